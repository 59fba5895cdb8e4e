"""Requests whose keys and values lie in random pages of a pool in which all else is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.kernels import Numbers


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    window: int
    """0: no window."""
    scale: float
    dtype: torch.dtype
    pool_dtype: torch.dtype
    page_size: int
    v_dim: int = 0
    """0: that of the keys."""
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    in_keys: bool = False
    """Whether values are the first numbers of the keys."""

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.dim

    def first_key(self, position: int) -> int:
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position + 1 - self.window) if self.window else 0


class Chunk(NamedTuple):
    """Tokens [begin, end) of a request."""

    request: int
    begin: int
    end: int


class Pools(NamedTuple):
    keys: Tensor
    values: Tensor


class PagedRequests:
    """All queries, keys and values of requests of the given lengths, known from the start."""

    def __init__(self, sizes: Sizes, lengths: Sequence[int], seed: int) -> None:
        self.sizes = sizes
        self.lengths = tuple(lengths)
        self.numbers = Numbers(seed)
        counts = [-(-length // sizes.page_size) for length in lengths]
        order = self.numbers.permutation(sum(counts) + 2)
        unused = order.pop() * sizes.page_size
        self.num_slots = (sum(counts) + 2) * sizes.page_size
        self.rows = self.numbers.permutation(len(lengths) + 2)[: len(lengths)]
        self.table = torch.full((len(lengths) + 2, max(lengths)), unused, dtype=torch.int32)
        self.slots: list[Tensor] = []
        for row, length, count in zip(self.rows, lengths, counts, strict=True):
            pages = torch.tensor([order.pop() for _ in range(count)])
            inside = torch.arange(sizes.page_size)
            slots = (pages.unsqueeze(1) * sizes.page_size + inside).flatten()[:length]
            self.slots.append(slots)
            self.table[row, :length] = slots
        self.queries = [self._heads(length, sizes.heads, sizes.dim) for length in lengths]
        self.keys = [self._heads(length, sizes.kv_heads, sizes.dim) for length in lengths]
        if sizes.in_keys:
            self.values = [keys[..., : sizes.value_dim] for keys in self.keys]
        else:
            shape = sizes.kv_heads, sizes.value_dim
            self.values = [self._heads(length, *shape) for length in lengths]
        self.sinks = self.numbers.normal((sizes.heads,), torch.float32) if sizes.has_sinks else None

    def empty_pools(self) -> Pools:
        sizes = self.sizes
        keys, values = (
            torch.full((self.num_slots, sizes.kv_heads, dim), torch.nan).to(sizes.pool_dtype)
            for dim in (sizes.dim, sizes.value_dim)
        )
        return Pools(keys, keys[..., : sizes.value_dim] if sizes.in_keys else values)

    def pools_before(self, chunks: Sequence[Chunk]) -> Pools:
        """With what the chunks' tokens must see of earlier ones, and no more."""
        pools = self.empty_pools()
        for request, begin, _ in chunks:
            self._write(pools, request, self.sizes.first_key(begin), begin)
        return pools

    def pools_after(self, chunks: Sequence[Chunk]) -> Pools:
        """What the pools of `pools_before` must hold after a step."""
        pools = self.pools_before(chunks)
        for request, begin, end in chunks:
            self._write(pools, request, begin, end)
        return pools

    def step(
        self, kernels: Any, pools: Pools, chunks: Sequence[Chunk], *, in_one: bool = True
    ) -> list[Tensor]:
        """Run the kernel. Returns [tokens, heads * value_dim] for each chunk.

        `in_one`: queries, keys and values are views of one tensor.
        """
        parts = self._new(chunks)
        if in_one:
            shapes = [part.shape[1:] for part in parts]
            flat = torch.cat([part.flatten(1) for part in parts], 1)
            views = flat.split([shape.numel() for shape in shapes], 1)
            parts = [v.unflatten(1, shape) for v, shape in zip(views, shapes, strict=True)]
        counts = [chunk.end - chunk.begin for chunk in chunks]
        return list(self._attend(kernels, pools, chunks, parts, chunks, counts).split(counts))

    def last_queries(
        self, kernels: Any, pools: Pools, chunks: Sequence[Chunk], sampled: Sequence[int]
    ) -> Tensor:
        """Run the kernel for the last queries of the chunks `sampled`: [those, heads * dim]."""
        queries, keys, values = self._new(chunks)
        ends = torch.tensor([chunk.end - chunk.begin for chunk in chunks]).cumsum(0)
        last = ends[list(sampled)] - 1
        parts = [queries.index_select(0, last), keys, values]
        rows = [chunks[i] for i in sampled]
        return self._attend(kernels, pools, chunks, parts, rows, [1] * len(rows))

    def _new(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """The chunks' queries, keys and values."""
        return [
            torch.cat([source[request][begin:end] for request, begin, end in chunks])
            for source in (self.queries, self.keys, self.values)
        ]

    def _attend(
        self,
        kernels: Any,
        pools: Pools,
        chunks: Sequence[Chunk],
        parts: Sequence[Tensor],
        rows: Sequence[Chunk],
        counts: Sequence[int],
    ) -> Tensor:
        """`rows` are those that have queries, and `counts` how many."""
        sizes = self.sizes
        out: Tensor = kernels.attention(
            *parts,
            *pools,
            torch.cat([self.slots[request][begin:end] for request, begin, end in chunks]),
            self.table,
            torch.tensor([self.rows[chunk.request] for chunk in rows], dtype=torch.int64),
            torch.tensor([0, *counts]).cumsum(0),
            torch.tensor([chunk.end for chunk in rows], dtype=torch.int64),
            sizes.scale,
            sizes.window,
            sizes.chunk,
            sizes.softcap,
            self.sinks,
        )
        width = sizes.heads * sizes.value_dim
        assert out.dtype == sizes.dtype and out.shape == (sum(counts), width)
        return out

    def in_chunks(self, kernels: Any, request: int, ends: Sequence[int]) -> Tensor:
        """The outputs of a whole request, alone, in chunks that end at `ends`."""
        pools, begin, outs = self.empty_pools(), 0, []
        for end in ends:
            outs += self.step(kernels, pools, [Chunk(request, begin, end)])
            begin = end
        return torch.cat(outs)

    def expected(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """A chunk's outputs in float64, and what they would be if no terms cancelled out."""
        sizes = self.sizes
        group = sizes.heads // sizes.kv_heads
        q = self.queries[chunk.request][chunk.begin : chunk.end].double()
        k, v = (
            self._stored(source[chunk.request][: chunk.end]).double().repeat_interleave(group, 1)
            for source in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,shd->hqs", q, k) * sizes.scale
        query = torch.arange(chunk.begin, chunk.end).unsqueeze(1)
        key = torch.arange(chunk.end)
        hidden = key > query
        first = torch.tensor([sizes.first_key(i) for i in range(chunk.begin, chunk.end)])
        hidden |= key < first.unsqueeze(1)
        if sizes.softcap:
            scores = torch.tanh(scores / sizes.softcap) * sizes.softcap
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double().view(-1, 1, 1).expand(-1, len(first), 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : chunk.end]
        exact, size = (torch.einsum("hqs,shd->qhd", weights, x).flatten(1) for x in (v, v.abs()))
        return exact, size

    def _heads(self, tokens: int, heads: int, dim: int) -> Tensor:
        return self.numbers.normal((tokens, heads, dim), self.sizes.dtype)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.sizes.pool_dtype)

    def _write(self, pools: Pools, request: int, begin: int, end: int) -> None:
        slots = self.slots[request][begin:end]
        for pool, source in zip(pools, (self.keys, self.values), strict=True):
            stored = self._stored(source[request][begin:end])
            if pool.element_size() == 1:  # float8 has no index_put
                pool.view(torch.uint8)[slots] = stored.view(torch.uint8)
            else:
                pool[slots] = stored
