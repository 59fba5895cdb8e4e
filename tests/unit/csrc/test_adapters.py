"""What adapters add to rows, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernels import TYPES, Numbers, examples, same_bits, torch_threads

NUM_SLOTS = 5


@pytest.mark.parametrize("dtype", TYPES)
@examples(60)
@given(
    rows=st.integers(0, 23),
    in_size=st.one_of(st.integers(1, 80), st.sampled_from([128, 512])),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    gap=st.sampled_from([0, 0, 3]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_adapters(
    kernels: Any,
    dtype: torch.dtype,
    rows: int,
    in_size: int,
    sizes: list[int],
    gap: int,
    threads: int,
    seed: int,
) -> None:
    """Each row gets what its slot's adapter makes of it, in any batch, with any number of threads;
    rows without adapters stay as they are."""
    numbers = Numbers(seed)
    generator = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    weights = kernels.AdapterWeights(in_size, sizes, NUM_SLOTS)
    adapters: list[list[tuple[torch.Tensor, torch.Tensor] | None]] = [[None] * len(sizes)]
    for slot in range(1, NUM_SLOTS):
        parts: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for size in sizes:
            rank = below(20)
            a = numbers.with_gap((rank, in_size), dtype, 0)
            b = numbers.with_gap((rank, size), dtype, 0)
            parts.append((a, b) if rank else None)
        adapters.append(parts)
        first, second = ([None if p is None else p[i] for p in parts] for i in (0, 1))
        weights.set(slot, first, second)
    x = numbers.with_gap((rows, in_size), dtype, gap)
    y = numbers.with_gap((rows, sum(sizes)), dtype, 0)
    slots = torch.randint(-1, NUM_SLOTS, (rows,), generator=generator, dtype=torch.int32)
    exact, size_of_terms = y.double(), y.double().abs()
    for row, slot in enumerate(slots.tolist()):
        parts = adapters[slot] if slot >= 0 else []
        start = 0
        for size, part in zip(sizes, parts, strict=False):
            if part is not None:
                a, b = (side.double() for side in part)
                exact[row, start : start + size] += x[row].double() @ a.t() @ b
                terms = x[row].double().abs() @ a.abs().t() @ b.abs()
                size_of_terms[row, start : start + size] += terms
            start += size
    out = y.clone()
    with torch_threads(threads):
        kernels.adapt_(out, x, slots, weights)
    step = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    # Of the sums in float32, and of the result's own type.
    bound = size_of_terms * 2.0**-18 + exact.abs() * step + 1e-30
    if dtype == torch.float16:
        bound += 1e-7
    assert bool(((out.double() - exact).abs() <= bound).all())
    for row in range(rows):
        alone = y[row : row + 1].clone()
        kernels.adapt_(alone, x[row : row + 1], slots[row : row + 1].clone(), weights)
        assert same_bits(alone[0], out[row])
        if slots[row] <= 0:
            assert same_bits(out[row], y[row])


def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    weights = kernels.AdapterWeights(8, [4], 2)
    a, b = torch.ones(2, 8), torch.ones(2, 4)
    weights.set(0, [a], [b])
    x, y = torch.ones(3, 8), torch.zeros(3, 4)
    slots = torch.zeros(3, dtype=torch.int32)
    for wrong in (
        lambda: weights.set(2, [a], [b]),
        lambda: weights.set(0, [a], [None]),
        lambda: weights.set(0, [a[:1]], [b]),
        lambda: weights.set(0, [a, a], [b, b]),
        lambda: weights.set(0, [a], [b.double()]),
        lambda: kernels.adapt_(y, x[:, :7], slots, weights),
        lambda: kernels.adapt_(y[:2], x, slots, weights),
        lambda: kernels.adapt_(y, x, slots[:2], weights),
        lambda: kernels.adapt_(y, x, slots.long(), weights),
        lambda: kernels.adapt_(y, x, slots + 2, weights),
        lambda: kernels.adapt_(y.bfloat16(), x.bfloat16(), slots, weights),
        lambda: kernels.AdapterWeights(0, [4], 2),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    kernels.adapt_(y, x, slots, weights)
    assert torch.equal(y, torch.full((3, 4), 16.0))
    weights.clear(0)
    kernels.adapt_(y, x, slots, weights)
    assert torch.equal(y, torch.full((3, 4), 16.0))
