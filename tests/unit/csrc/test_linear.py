"""Matrix products against torch in float64, and to the last bit among themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels import TYPES, Numbers, assert_within, examples, same_bits, torch_threads

ROWS = st.one_of(st.integers(0, 14), st.sampled_from([95, 96, 97, 140, 193]))
OUTS = st.one_of(st.integers(1, 140), st.sampled_from([16, 48, 64, 128, 192]))
UNITS = st.one_of(st.integers(0, 70), st.sampled_from([96, 128, 257]))
SEEDS = st.integers(0, 2**16)
WITH_TYPES = pytest.mark.parametrize("dtype", TYPES)


def in_size(units: int, dtype: torch.dtype) -> int:
    """Odd sizes are for float32 only."""
    return units * 4 // dtype.itemsize


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact product, and what it would be if no terms cancelled out."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.t(), x.abs() @ weight.t().abs()
    return (exact, size) if bias is None else (exact + bias.double(), size + bias.double().abs())


@WITH_TYPES
@examples(30)
@given(out=OUTS, units=UNITS, seed=SEEDS)
def test_pack(kernels: Any, dtype: torch.dtype, out: int, units: int, seed: int) -> None:
    """Units of 32 bits change places, and the last panel is filled up with zeros."""
    size = in_size(units, dtype)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-(2**31), 2**31 - 1, (out, units), generator=generator, dtype=torch.int)
    packed = kernels.pack(weight.view(dtype) if units else weight.new_empty(out, 0, dtype=dtype))
    panel = kernels.pack(torch.zeros(1, 2, dtype=dtype)).shape[0]
    panels = -(-out // panel)
    assert packed.dtype == dtype and packed.shape == (panels * panel, size)
    if units:
        rows = packed.view(torch.int).view(panels, units, panel).transpose(1, 2).flatten(0, 1)
        assert torch.equal(rows[:out], weight)
        assert not rows[out:].any()


@WITH_TYPES
@examples(40)
@given(
    rows=st.one_of(st.integers(0, 20), st.sampled_from([64, 300, 2000])),
    out=OUTS,
    units=UNITS,
    threads=st.sampled_from([1, 2, 3]),
    seed=SEEDS,
)
def test_unpack_rows(
    kernels: Any, dtype: torch.dtype, rows: int, out: int, units: int, threads: int, seed: int
) -> None:
    """The matrix that was packed, whatever its bits mean; any rows of it, in any order."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-(2**31), 2**31 - 1, (out, units), generator=generator, dtype=torch.int)
    weight = weight.view(dtype) if units else weight.new_empty(out, 0, dtype=dtype)
    ids = torch.randint(out, (rows,), generator=generator)
    packed = kernels.pack(weight)
    with torch_threads(threads):
        assert same_bits(kernels.unpack_rows(packed, ids, out), weight[ids])
        assert same_bits(kernels.unpack_rows(packed, torch.arange(out), out), weight)


@WITH_TYPES
def test_rows_of_a_panel_that_are_not_in_the_matrix(kernels: Any, dtype: torch.dtype) -> None:
    """The last panel is filled up, but its padding is no row. Nor is what lies before the first."""
    out = 70
    packed = kernels.pack(torch.ones(out, 8, dtype=dtype))
    for wrong in (out, packed.shape[0] - 1, packed.shape[0], 2**40, -1, -(2**63)):
        for ids in ([wrong], [0, out - 1, wrong], [wrong] + [0] * 5000):
            with pytest.raises(RuntimeError, match=rf"{wrong}, not in \[0, {out}\)"):
                kernels.unpack_rows(packed, torch.tensor(ids), out)


@WITH_TYPES
@examples(60)
@given(
    rows=ROWS,
    out=OUTS,
    units=UNITS,
    gap=st.sampled_from([0, 0, 1, 3, 64]),
    with_bias=st.booleans(),
    as_float=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_linear(
    kernels: Any,
    dtype: torch.dtype,
    rows: int,
    out: int,
    units: int,
    gap: int,
    with_bias: bool,
    as_float: bool,
    threads: int,
    seed: int,
) -> None:
    numbers = Numbers(seed)
    size = in_size(units, dtype)
    x = numbers.with_gap((rows, size), dtype, gap)
    weight = numbers.normal((out, size), dtype)
    bias = numbers.normal((out,), dtype) if with_bias else None
    with torch_threads(threads):
        found = kernels.linear(x, kernels.pack(weight), bias, out, as_float)
    assert found.dtype == (torch.float32 if as_float else dtype)
    assert_within(found, *reference(x, weight, bias))


@WITH_TYPES
@examples(25)
@given(
    rows=st.one_of(st.integers(2, 14), st.sampled_from([97, 150])),
    out=st.sampled_from([5, 64, 200, 513]),
    units=st.sampled_from([1, 17, 64, 150]),
    seed=SEEDS,
)
def test_a_row_is_the_same_in_any_batch(
    kernels: Any, dtype: torch.dtype, rows: int, out: int, units: int, seed: int
) -> None:
    numbers = Numbers(seed)
    size = in_size(units, dtype)
    x, weight = numbers.normal((rows, size), dtype), numbers.normal((out, size), dtype)
    bias = numbers.normal((out,), dtype)
    packed = kernels.pack(weight)
    products = (
        lambda x: kernels.linear(x, packed, bias, out, False),
        lambda x: kernels.linear(x, packed, bias, out, True),
    )
    order, first = numbers.permutation(rows), numbers.permutation(rows)[0]
    for product in products:
        whole = product(x)
        with torch_threads(2):
            assert same_bits(product(x), whole)
        assert same_bits(product(x[order]), whole[order])
        assert same_bits(product(x[first:]), whole[first:])
        for row in (0, first, rows - 1):
            assert same_bits(product(x[row : row + 1]), whole[row : row + 1])


@WITH_TYPES
def test_what_is_not_finite_stays_in_its_row_and_column(kernels: Any, dtype: torch.dtype) -> None:
    numbers = Numbers(0)
    x, weight = numbers.normal((9, 40), dtype), numbers.normal((70, 40), dtype)
    x[3, 7], weight[66, 39] = torch.nan, torch.inf
    wrong = ~kernels.linear(x, kernels.pack(weight), None, 70, False).isfinite()
    assert wrong[3].all() and wrong[:, 66].all()
    assert int(wrong.sum()) == 70 + 9 - 1
