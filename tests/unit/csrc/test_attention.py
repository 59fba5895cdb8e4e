"""Attention from the paged pool against torch in float64, and to the last bit among chunkings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernels import (
    TYPES,
    Numbers,
    assert_within,
    bits,
    examples,
    same_bits,
    torch_threads,
)
from tests.support.paged import Chunk, PagedRequests, Sizes

F8 = torch.float8_e4m3fn
DIMS = st.one_of(
    st.sampled_from([8, 16, 32, 64, 80, 96, 128, 192, 256, 512, 576]),
    st.integers(1, 128).map(lambda half: 2 * half),
)
PREFIXES = st.one_of(st.just(0), st.integers(0, 150), st.sampled_from([511, 512, 513, 700, 1100]))
NEW = st.one_of(st.just(1), st.integers(1, 70))
WINDOWS = st.sampled_from([0, 0, 0, 1, 5, 64, 100, 513, 4000])
SEEDS = st.integers(0, 2**16)
WITH_TYPES = pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(dtype, pool) for dtype in TYPES for pool in (dtype, F8)]
)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """What a case has besides its types."""
    kv_heads = draw(st.integers(1, 4))
    group = draw(st.one_of(st.integers(1, 6), st.sampled_from([8, 16, 25, 48, 53, 64])))
    if kv_heads * group > 48:
        kv_heads = 1
    dim = draw(DIMS)
    v_dim = draw(st.one_of(st.just(0), DIMS))
    return {
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "dim": dim,
        "window": draw(WINDOWS),
        "scale": dim**-0.5 * draw(st.sampled_from([1.0, 1.0, 0.2, 3.0])),
        "page_size": draw(st.sampled_from([1, 16, 32])),
        "v_dim": v_dim,
        "in_keys": v_dim <= dim and draw(st.booleans()),
        "chunk": draw(st.sampled_from([0, 0, 0, 1, 7, 64, 100, 600])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.5, 30.0])),
        "has_sinks": draw(st.booleans()),
    }


@WITH_TYPES
@examples(20)
@given(
    shape=shapes(),
    rows=st.lists(st.tuples(PREFIXES, NEW), min_size=1, max_size=5),
    in_one=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=SEEDS,
)
def test_a_step(
    kernels: Any,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    shape: dict[str, Any],
    rows: list[tuple[int, int]],
    in_one: bool,
    threads: int,
    seed: int,
) -> None:
    """Rows that extend and rows that decode. What no row may read is NaN, also behind a window."""
    sizes = Sizes(dtype=dtype, pool_dtype=pool_dtype, **shape)
    requests = PagedRequests(sizes, [prefix + new for prefix, new in rows], seed)
    chunks = [Chunk(i, prefix, prefix + new) for i, (prefix, new) in enumerate(rows)]
    pools = requests.pools_before(chunks)
    with torch_threads(threads):
        outs = requests.step(kernels, pools, chunks, in_one=in_one)
    for chunk, out in zip(chunks, outs, strict=True):
        assert_within(out, *requests.expected(chunk))
    for found, wanted in zip(pools, requests.pools_after(chunks), strict=True):
        assert same_values(found, wanted)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit, but for the kind of a NaN."""
    x, y = a.float(), b.float()
    return torch.equal(x.isnan(), y.isnan()) and same_bits(x.nan_to_num(), y.nan_to_num())


@WITH_TYPES
@examples(8)
@given(
    shape=shapes(),
    length=st.one_of(st.integers(2, 200), st.sampled_from([530, 700])),
    others=st.lists(st.tuples(PREFIXES, NEW), max_size=4),
    data=st.data(),
    seed=SEEDS,
)
def test_a_token_is_the_same_in_any_chunk_and_batch(
    kernels: Any,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    shape: dict[str, Any],
    length: int,
    others: list[tuple[int, int]],
    data: st.DataObject,
    seed: int,
) -> None:
    sizes = Sizes(dtype=dtype, pool_dtype=pool_dtype, **shape)
    requests = PagedRequests(sizes, [length, *(sum(row) for row in others)], seed)
    whole = requests.in_chunks(kernels, 0, [length])
    cuts = data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=6))
    with torch_threads(data.draw(st.sampled_from([1, 2]))):
        assert same_bits(requests.in_chunks(kernels, 0, [*sorted(cuts), length]), whole)
        assert same_bits(requests.in_chunks(kernels, 0, range(1, length + 1)), whole)
    # In a batch, at a random place, with a random prefix.
    begin = data.draw(st.sampled_from([0, length - 1, *cuts]))
    chunks = [Chunk(i + 1, prefix, prefix + new) for i, (prefix, new) in enumerate(others)]
    place = data.draw(st.integers(0, len(chunks)))
    chunks.insert(place, Chunk(0, begin, length))
    for threads in (1, 2):
        with torch_threads(threads):
            outs = requests.step(kernels, requests.pools_before(chunks), chunks)
        assert same_bits(outs[place], whole[begin:])
        for chunk, out in zip(chunks, outs, strict=True):  # the others have it too
            pools = requests.pools_before([chunk])
            assert same_bits(requests.step(kernels, pools, [chunk])[0], out)


@WITH_TYPES
@examples(8)
@given(
    shape=shapes(),
    rows=st.lists(st.tuples(PREFIXES, NEW, st.booleans()), min_size=1, max_size=5),
    seed=SEEDS,
)
def test_fewer_queries_than_new_tokens(
    kernels: Any,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    shape: dict[str, Any],
    rows: list[tuple[int, int, bool]],
    seed: int,
) -> None:
    """The last queries of some rows give what they give among all, and all tokens are stored."""
    sizes = Sizes(dtype=dtype, pool_dtype=pool_dtype, **shape)
    requests = PagedRequests(sizes, [prefix + new for prefix, new, _ in rows], seed)
    chunks = [Chunk(i, prefix, prefix + new) for i, (prefix, new, _) in enumerate(rows)]
    wanted = requests.step(kernels, requests.pools_before(chunks), chunks)
    pools = requests.pools_before(chunks)
    sampled = [i for i, (_, new, is_sampled) in enumerate(rows) if is_sampled and new]
    outs = requests.last_queries(kernels, pools, chunks, sampled)
    for i, out in zip(sampled, outs, strict=True):
        assert same_bits(out, wanted[i][-1])
    for pool, expected in zip(pools, requests.pools_after(chunks), strict=True):
        assert same_values(pool, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_many_rows_decode_together(kernels: Any, dtype: torch.dtype) -> None:
    """As many as choose another split of the work; long ones among them."""
    sizes = Sizes(8, 4, 64, 0, 0.125, dtype, dtype, 16)
    lengths = [1, 2, 64, 65, 512, 513, 1030, 40, 576]
    requests = PagedRequests(sizes, lengths, 0)
    chunks = [Chunk(i, length - 1, length) for i, length in enumerate(lengths)]
    outs = requests.step(kernels, requests.pools_before(chunks), chunks)
    for threads in (1, 2):
        with torch_threads(threads):
            for number in (1, 3, 4, 9):
                again = requests.step(kernels, requests.pools_before(chunks), chunks[-number:])
                assert all(same_bits(a, b) for a, b in zip(again, outs[-number:], strict=True))
    for chunk, out in zip(chunks, outs, strict=True):
        assert_within(out, *requests.expected(chunk))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_may_share_pages_and_have_no_tokens(kernels: Any, dtype: torch.dtype) -> None:
    sizes = Sizes(4, 2, 32, 0, 0.2, dtype, dtype, 16)
    requests = PagedRequests(sizes, [100, 100], 1)
    requests.slots[1][:64] = requests.slots[0][:64]
    requests.table[requests.rows[1], :64] = requests.slots[0][:64].int()
    for source in (requests.keys, requests.values):
        source[1][:64] = source[0][:64]
    chunks = [Chunk(0, 90, 100), Chunk(0, 0, 0), Chunk(1, 64, 100), Chunk(1, 5, 5)]
    outs = requests.step(kernels, requests.pools_before(chunks), chunks)
    assert [len(out) for out in outs] == [10, 0, 36, 0]
    for i in (0, 2):
        assert_within(outs[i], *requests.expected(chunks[i]))
    nothing = requests.step(kernels, requests.empty_pools(), [Chunk(0, 0, 0)])
    assert nothing[0].shape == (0, 128)


@WITH_TYPES
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3])
def test_extreme_scores(
    kernels: Any, dtype: torch.dtype, pool_dtype: torch.dtype, scale: float
) -> None:
    """All keys weigh the same, or one takes all."""
    sizes = Sizes(2, 1, 16, 0, scale, dtype, pool_dtype, 1)
    requests = PagedRequests(sizes, [600], 2)
    chunk = Chunk(0, 0, 600)
    (out,) = requests.step(kernels, requests.empty_pools(), [chunk])
    exact, size = requests.expected(chunk)
    assert_within(out, exact, size * (100 if scale > 1 else 1))  # scores have errors of 1e-4


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_in_a_pool_of_8_bits(kernels: Any, dtype: torch.dtype) -> None:
    """Stored as torch rounds, but saturating; and read exactly."""
    sizes = Sizes(1, 1, 256, 0, 1.0, dtype, F8, 1)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    kinds = [dtype] if dtype != torch.float32 else [torch.float16, torch.bfloat16]
    for kind in kinds:
        numbers = every.view(kind).to(dtype)
        requests = PagedRequests(sizes, [1] * 256, 0)
        requests.values = list(numbers.view(256, 1, 1, 256))
        pools = requests.empty_pools()
        outs = requests.step(kernels, pools, [Chunk(i, 0, 1) for i in range(256)])
        stored = torch.stack([pools.values[slots].flatten() for slots in requests.slots])
        wanted = numbers.float().clamp(-448, 448).to(F8).view(256, 256)
        nan = wanted.float().isnan()
        assert torch.equal(stored.float().isnan(), nan)
        assert torch.equal(bits(stored)[~nan], bits(wanted)[~nan])
        read = torch.cat(outs).float()
        assert torch.equal(read.isnan(), nan)
        assert torch.equal(read[~nan], stored.float()[~nan])


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_nan_of_a_request_is_not_lost(kernels: Any, dtype: torch.dtype, where: str) -> None:
    """It is seen in the request's output, and in no other's."""
    sizes = Sizes(2, 1, 16, 0, 0.25, dtype, dtype, 1)
    for position in (0, 3, 63, 64, 511, 512, 599):
        requests = PagedRequests(sizes, [600, 70], Numbers(0).permutation(9)[0])
        source = {"query": requests.queries, "key": requests.keys, "value": requests.values}[where]
        source[0][599 if where == "query" else position] = torch.nan
        chunks = [Chunk(0, 599, 600), Chunk(1, 0, 70)]
        outs = requests.step(kernels, requests.pools_before(chunks), chunks)
        assert outs[0].isnan().all()
        assert_within(outs[1], *requests.expected(chunks[1]))
