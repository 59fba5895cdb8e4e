"""Each test runs with every instruction set that the processor and the compiler have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.native.compiler import ISA_FLAGS
from tests.support.kernels import load_kernels


@pytest.fixture(scope="module", params=tuple(ISA_FLAGS))
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The library. Weights must be packed anew for each instruction set."""
    library = load_kernels()
    if request.param not in library.available():
        pytest.skip(f"there is no {request.param} here")
    before = library.isa()
    library.use(request.param)
    yield library
    library.use(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tests that don't say otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
