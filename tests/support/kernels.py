"""The library of CPU kernels in tests: how many examples, how exact it must be."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from engine.native import library

EXAMPLES_VARIABLE = "MANTA_TEST_KERNEL_EXAMPLES"
"""At most so many examples for each property."""
F32_ERROR = 2e-5
"""All kernels compute in float32. Their error, as a share of what a sum would be if no terms
cancelled out. A type of 16 bits adds the rounding of the result."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_kernels() -> Any:
    """The library; skips the test where it can't be had."""
    kernels = library.load()
    if kernels is None:
        pytest.skip(f"no CPU kernels: {library.reason()}")
    return kernels


def examples(count: int) -> settings:
    """Settings of a property test with the same examples in each run."""
    limit = int(os.environ.get(EXAMPLES_VARIABLE, count))
    return settings(max_examples=min(count, limit), derandomize=True, deadline=None)


@contextmanager
def instruction_set(name: str) -> Iterator[Any]:
    """The library with one instruction set; skips the test where there is none. Weights must be
    packed anew for each."""
    kernels = load_kernels()
    if name not in kernels.available():
        pytest.skip(f"there is no {name} here")
    before = kernels.isa()
    kernels.use(name)
    try:
        yield kernels
    finally:
        kernels.use(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Numbers:
    """Random tensors; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator).to(dtype)

    def with_gap(self, shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> Tensor:
        """A view with `gap` NaN between its rows. It ends where its memory ends."""
        whole = torch.full((shape[0], gap + self.size_of_row(shape)), torch.nan, dtype=dtype)
        whole[:, gap:] = self.normal(shape, dtype).flatten(1)
        return whole[:, gap:].unflatten(1, shape[1:])

    def permutation(self, count: int) -> list[int]:
        numbers: list[int] = torch.randperm(count, generator=self.generator).tolist()
        return numbers

    @staticmethod
    def size_of_row(shape: tuple[int, ...]) -> int:
        size = 1
        for length in shape[1:]:
            size *= length
        return size


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same to the last bit, NaN and signs of zeros included."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_within(found: Tensor, expected: Tensor, size: Tensor) -> None:
    """`expected` is exact, in float64; `size` is what it would be if no terms cancelled out.

    Allowed are `F32_ERROR` of `size` and, for 16 bits, half a unit in the last place.
    """
    assert found.shape == expected.shape
    info = torch.finfo(found.dtype)
    allowed = F32_ERROR * size + info.smallest_normal * info.eps
    if found.dtype != torch.float32:
        allowed = allowed + 0.51 * info.eps * (expected.abs() + allowed)
    error = (found.double() - expected).abs()
    wrong = ~(error <= allowed)  # a NaN is wrong
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong, the first at "
        f"{wrong.nonzero()[0].tolist()}: {found[wrong][0]}, not {expected[wrong][0]}"
    )
