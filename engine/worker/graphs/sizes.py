"""Batch sizes that decodes are captured for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from engine.protocol.step import IntArray, ModelWorkerBatch

MAX_PADDING = 2
"""A graph takes batches of at least its size / MAX_PADDING rows; smaller ones run eagerly."""


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


def is_decode(batch: ModelWorkerBatch) -> bool:
    """Whether a complete step can run as decodes: every token of it is one to sample behind."""
    return (
        len(batch.prefix_rows) == 0
        and batch.next_prompt_ids is None
        and np.array_equal(batch.query_lens, batch.num_sampled)
    )


def pad_decodes(batch: ModelWorkerBatch, size: int) -> ModelWorkerBatch:
    """A step that `is_decode` with a line for each of its tokens, padded to `size` lines.

    A layer writes all keys and values of a step before any token attends. So a token finds those
    of the drafts before it in the cache, and decodes like any other, one position further on. That
    reads a request's keys once for each of its tokens, but needs no other graphs than decodes have.

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
        new_rows=[],
    )


def _padded(values: np.ndarray, size: int, padding: int) -> IntArray:
    filled = np.full(size, padding, dtype=np.int32)
    filled[: len(values)] = values
    return filled
