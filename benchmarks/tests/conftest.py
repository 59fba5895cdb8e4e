"""The benchmarks' own tests run as the project's do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.kernels import load_kernels
from tests.support.settings import set_up


def pytest_configure(config: pytest.Config) -> None:
    set_up()


@pytest.fixture
def own_threads() -> Iterator[None]:
    """For a benchmark that computes in this process, with kernels, and sets its threads."""
    load_kernels()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
