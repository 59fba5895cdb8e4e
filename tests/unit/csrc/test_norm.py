"""RMSNorm against torch in float64, and to the last bit for a row in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels import TYPES, Numbers, assert_within, examples, same_bits, torch_threads

SIZES = st.one_of(st.integers(1, 70), st.sampled_from([16, 64, 96, 255, 256, 1000, 2048]))
ROWS = st.one_of(st.integers(0, 40), st.sampled_from([100]))
EPS = st.sampled_from([1e-6, 1e-5, 0.1])
SCALES = st.sampled_from([1e-3, 1.0, 30.0])
SEEDS = st.integers(0, 2**16)
WITH_TYPES = pytest.mark.parametrize("dtype", TYPES)


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    mean = x.square().mean(-1, keepdim=True)
    return x / (mean + eps).sqrt() * weight.double()


@WITH_TYPES
@examples(40)
@given(
    rows=ROWS,
    heads=st.sampled_from([None, None, 1, 3, 8]),
    size=SIZES,
    gap=st.sampled_from([0, 0, 1, 5, 32]),
    head_gap=st.sampled_from([0, 0, 2]),
    eps=EPS,
    scale=SCALES,
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_rms_norm(
    kernels: Any,
    dtype: torch.dtype,
    rows: int,
    heads: int | None,
    size: int,
    gap: int,
    head_gap: int,
    eps: float,
    scale: float,
    threads: int,
    seed: int,
) -> None:
    numbers = Numbers(seed)
    if heads is None:
        x = numbers.with_gap((rows, size), dtype, gap)
    else:
        x = numbers.with_gap((rows, heads, size + head_gap), dtype, gap)[..., head_gap:]
    x.mul_(scale)
    before = x.clone()
    weight = numbers.normal((size,), dtype)
    with torch_threads(threads):
        found = kernels.rms_norm(x, weight, eps)
    expected = reference(x, weight, eps)
    assert found.dtype == dtype and found.is_contiguous()
    assert_within(found, expected, expected.abs())
    assert same_bits(x, before)


@WITH_TYPES
@examples(40)
@given(rows=ROWS, size=SIZES, eps=EPS, scale=SCALES, threads=st.sampled_from([1, 2]), seed=SEEDS)
def test_add_rms_norm(
    kernels: Any,
    dtype: torch.dtype,
    rows: int,
    size: int,
    eps: float,
    scale: float,
    threads: int,
    seed: int,
) -> None:
    numbers = Numbers(seed)
    x, residual = (numbers.normal((rows, size), dtype) * scale for _ in range(2))
    weight = numbers.normal((size,), dtype)
    total = residual + x
    with torch_threads(threads):
        assert kernels.add_rms_norm_(x, residual, weight, eps) is None
    assert same_bits(residual, total)
    expected = reference(total, weight, eps)
    assert_within(x, expected, expected.abs())
    assert same_bits(x, kernels.rms_norm(total, weight, eps))


@WITH_TYPES
@examples(15)
@given(rows=st.sampled_from([2, 17, 70]), size=st.sampled_from([7, 64, 1000]), seed=SEEDS)
def test_a_row_is_the_same_in_any_batch(
    kernels: Any, dtype: torch.dtype, rows: int, size: int, seed: int
) -> None:
    numbers = Numbers(seed)
    x, residual = numbers.normal((rows, size), dtype), numbers.normal((rows, size), dtype)
    weight = numbers.normal((size,), dtype)
    whole = kernels.rms_norm(x, weight, 1e-5)
    added, total = x.clone(), residual.clone()
    kernels.add_rms_norm_(added, total, weight, 1e-5)
    with torch_threads(2):
        assert same_bits(kernels.rms_norm(x, weight, 1e-5), whole)
        again = x.clone()
        kernels.add_rms_norm_(again, residual.clone(), weight, 1e-5)
        assert same_bits(again, added)
    order = numbers.permutation(rows)
    assert same_bits(kernels.rms_norm(x[order], weight, 1e-5), whole[order])
    heads = x.view(1, rows, size)
    assert same_bits(kernels.rms_norm(heads, weight, 1e-5)[0], whole)
    for row in (0, order[0], rows - 1):
        part = slice(row, row + 1)
        assert same_bits(kernels.rms_norm(x[part], weight, 1e-5), whole[part])
        alone = x[part].clone()
        kernels.add_rms_norm_(alone, residual[part].clone(), weight, 1e-5)
        assert same_bits(alone, added[part])


@WITH_TYPES
def test_what_is_not_finite_stays_in_its_row(kernels: Any, dtype: torch.dtype) -> None:
    x = Numbers(0).normal((5, 37), dtype)
    x[2, 36] = torch.nan
    found = kernels.rms_norm(x, torch.ones(37, dtype=dtype), 1e-5)
    assert found[2].isnan().all() and found[[0, 1, 3, 4]].isfinite().all()
    zeros = kernels.rms_norm(torch.zeros(2, 37, dtype=dtype), torch.ones(37, dtype=dtype), 1e-5)
    assert not zeros.any()
