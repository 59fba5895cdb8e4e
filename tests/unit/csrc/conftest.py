"""Each test runs with every instruction set that the processor and the compiler have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.native.compiler import ISA_FLAGS
from tests.support.kernels import instruction_set, torch_threads


@pytest.fixture(scope="module", params=tuple(ISA_FLAGS))
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    with instruction_set(request.param) as library:
        yield library


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tests that don't say otherwise."""
    with torch_threads(1):
        yield
