"""Batch sizes that decodes are captured for, and which steps can run as decodes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from engine.protocol.step import IntArray, ModelWorkerBatch

MAX_PADDING = 2
"""A graph takes batches of at least its size / MAX_PADDING rows; smaller ones run eagerly."""

MAX_CHUNK_READS = 1 << 16
"""Keys that a step's chunks may read if they run as decodes, each token all those before it. An
8B model on an H100 reads so many within 3 ms, and takes 14 ms to launch an eager step's kernels."""


def graph_sizes(largest: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 256, of 16 up to 512, of 32 above; `largest` is the last."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, largest, 32)]
    return [size for size in sizes if size < largest] + [largest]


def capture_order(sizes: Iterable[int]) -> list[int]:
    """The largest size comes first, because all others fit into the memory that it takes. Powers of
    two follow, so that a size that a limit leaves out is padded to at most twice its rows. Then
    come the other sizes."""
    ordered = sorted(sizes, key=lambda size: (size & (size - 1) != 0, -size))
    largest = max(ordered)
    return [largest, *(size for size in ordered if size != largest)]


def smallest_fitting(sizes: Iterable[int], rows: int) -> int | None:
    """The smallest of `sizes` for a batch of `rows`; None if that would pad too much."""
    size = min((size for size in sizes if size >= rows), default=None)
    return None if size is None or size > max(MAX_PADDING * rows, 8) else size


def runs_as_decodes(batch: ModelWorkerBatch) -> bool:
    """Whether each token of a complete step can run as a line of its own: decodes and drafts can,
    and short chunks, which then don't wait for the host."""
    if batch.next_prompt_ids is not None or batch.pooled is not None:
        return False
    counts = batch.query_lens.astype(np.int64)
    # The last of n tokens reads `seq_lens` keys, the first n - 1 fewer.
    reads = counts * batch.seq_lens - counts * (counts - 1) // 2
    return int(reads[batch.num_sampled < counts].sum()) <= MAX_CHUNK_READS


def pad_decodes(batch: ModelWorkerBatch, size: int) -> ModelWorkerBatch:
    """A step that `runs_as_decodes` with a line for each of its tokens, padded to `size` lines.

    A layer writes all keys and values of a step before any token attends. So a token finds those
    of the tokens before it in the cache, and decodes like any other, one position further on. That
    reads a request's keys once for each of its tokens, but needs no other graphs than decodes have.
    Replaced prefixes are left out.

    Further lines are row 0's first token at KV slot 0; both are padding, so their results and
    writes touch no request.
    """
    counts = batch.query_lens
    ends = np.cumsum(counts)
    places = np.repeat(batch.seq_lens - ends, counts) + np.arange(1, len(batch.input_ids) + 1)
    ones = np.ones(size, np.int32)
    return msgspec.structs.replace(
        batch,
        req_pool_indices=_padded(np.repeat(batch.req_pool_indices, counts), size, 0),
        query_lens=ones,
        num_sampled=ones,
        seq_lens=_padded(places, size, 1),
        input_ids=_padded(batch.input_ids, size, 0),
        out_cache_loc=_padded(batch.out_cache_loc, size, 0),
        prefix_rows=batch.prefix_rows[:0],
        prefix_lens=batch.prefix_lens[:0],
        prefix_locs=batch.prefix_locs[:0],
        new_rows=[],
        adapters=None
        if batch.adapters is None
        else _padded(np.repeat(batch.adapters, counts), size, -1),
    )


def nothing_but_padding(size: int) -> ModelWorkerBatch:
    """A step of `size` lines that are padding."""
    none = np.zeros(0, np.int32)
    empty = ModelWorkerBatch(
        step=0,
        micro_batch=0,
        req_pool_indices=none,
        query_lens=none,
        num_sampled=none,
        seq_lens=none,
        input_ids=none,
        out_cache_loc=none,
        prefix_rows=none,
        prefix_lens=none,
        prefix_locs=none,
        new_rows=[],
    )
    return pad_decodes(empty, size)


def _padded(values: np.ndarray, size: int, padding: int) -> IntArray:
    filled = np.full(size, padding, dtype=np.int32)
    filled[: len(values)] = values
    return filled
