"""Rotary embedding and SwiGLU's gate against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels import TYPES, Numbers, assert_within, examples, same_bits, torch_threads

SEEDS = st.integers(0, 2**16)
HALF_DIMS = st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 48, 64, 128]))
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([16, 64, 255, 1000]))
CLOSED = 1e-28
"""The size of a number whose gate is closed: 0 is as good."""
WITH_TYPES = pytest.mark.parametrize("dtype", TYPES)


def rotated(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """x [tokens, heads, dim] by the rows [tokens, dim] of the table, and the terms' size."""
    first, second = x.double().chunk(2, -1)
    cos, sin = table.double().unsqueeze(1).chunk(2, -1)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    a, b, c, s = first.abs(), second.abs(), cos.abs(), sin.abs()
    return exact, torch.cat((a * c + b * s, b * c + a * s), -1)


@WITH_TYPES
@examples(60)
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    half=HALF_DIMS,
    gap=st.sampled_from([0, 0, 1, 16]),
    in_one=st.booleans(),
    seed=SEEDS,
)
def test_rotate(
    kernels: Any,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int,
    gap: int,
    in_one: bool,
    seed: int,
) -> None:
    """Queries and keys are changed in place, and nothing between them is."""
    numbers = Numbers(seed)
    dim = 2 * half
    if in_one:  # parts of one tensor, as the models have them
        whole = numbers.with_gap((tokens, heads + 2 * kv_heads, dim), dtype, gap)
        q, k, v = whole.split([heads, kv_heads, kv_heads], 1)
    else:  # gaps between the heads
        q = numbers.with_gap((tokens, heads, dim + gap), dtype, gap)[..., gap:]
        k = v = numbers.with_gap((tokens, kv_heads, dim), dtype, gap)
    angle = torch.rand(9, half, generator=numbers.generator) * 7
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    positions = torch.randint(9, (tokens,), generator=numbers.generator)
    before = [x.clone() for x in (q, k, v)]
    kernels.rotate_(positions, q, k, cos_sin)
    assert_within(q, *rotated(before[0], cos_sin[positions]))
    assert_within(k, *rotated(before[1], cos_sin[positions]))
    if in_one:
        assert same_bits(v, before[2])
    for base in (q._base, k._base):
        if base is not None and gap:
            assert base[:, :gap].isnan().all()
    if tokens:  # a token alone
        alone = [x[-1:].clone() for x in before]
        kernels.rotate_(positions[-1:], alone[0], alone[1], cos_sin)
        assert same_bits(alone[0], q[-1:]) and same_bits(alone[1], k[-1:])


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@WITH_TYPES
@examples(60)
@given(
    rows=st.integers(0, 30),
    size=SIZES,
    scale=st.sampled_from([1e-4, 1.0, 10.0, 40.0]),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_silu_and_mul(
    kernels: Any, dtype: torch.dtype, rows: int, size: int, scale: float, threads: int, seed: int
) -> None:
    numbers = Numbers(seed)
    gate_up = numbers.normal((rows, 2 * size), dtype) * scale
    with torch_threads(threads):
        found = kernels.silu_and_mul(gate_up)
    expected = gated(gate_up)
    assert found.dtype == dtype
    assert_within(found, expected, expected.abs() + CLOSED)
    if rows:
        assert same_bits(kernels.silu_and_mul(gate_up[-1:]), found[-1:])
        with torch_threads(3 - threads):
            assert same_bits(kernels.silu_and_mul(gate_up), found)


@WITH_TYPES
def test_silu_of_extreme_values(kernels: Any, dtype: torch.dtype) -> None:
    """Large gates pass or close; there is nothing between."""
    largest = torch.finfo(dtype).max
    gates = [largest, 1e4, 100.0, 89.0, 88.0, 87.0, 20.0, 1e-3, 1e-7, 0.0]
    gates += [-gate for gate in gates]
    gate = torch.tensor(gates, dtype=dtype).repeat(3)
    for up in (1.0, -0.5, 0.0):
        both = torch.cat((gate, torch.full_like(gate, up))).unsqueeze(0)
        found, expected = kernels.silu_and_mul(both), gated(both)
        assert_within(found, expected, expected.abs() + CLOSED)


@WITH_TYPES
def test_silu_of_what_is_not_finite(kernels: Any, dtype: torch.dtype) -> None:
    """The same as torch's; a NaN stays where it is."""
    values = [torch.nan, torch.inf, -torch.inf, 1.0, -1.0, 0.0]
    pairs = torch.tensor([[a, b] for a in values for b in values], dtype=dtype)
    gate_up = torch.cat((pairs[:, 0], pairs[:, 1])).unsqueeze(0)
    found = kernels.silu_and_mul(gate_up)[0]
    expected = (torch.nn.functional.silu(pairs[:, 0].double()) * pairs[:, 1].double()).to(dtype)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_silu_of_every_number(kernels: Any) -> None:
    """Of all float16 numbers that are finite, and then of all bfloat16 numbers."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        numbers = every.view(dtype)
        numbers = numbers[numbers.isfinite()]
        for kind in (dtype, torch.float32):
            gate_up = torch.cat((numbers, torch.ones_like(numbers))).unsqueeze(0).to(kind)
            found, expected = kernels.silu_and_mul(gate_up), gated(gate_up)
            assert_within(found, expected, expected.abs() + CLOSED)
