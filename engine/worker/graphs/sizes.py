"""Batch sizes that decodes are captured for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from engine.protocol.messages import IntArray, ModelWorkerBatch

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
    """Whether a complete step can run as decodes: rows with one token, or with drafts behind it,
    all of which sample."""
    rows = len(batch.req_pool_indices)
    return (
        batch.num_extend == 0
        and len(batch.prefix_rows) == 0
        and np.array_equal(batch.sample_rows, np.arange(rows))
    )


def num_decodes(batch: ModelWorkerBatch) -> int:
    """Rows of `as_decodes(batch)`."""
    return len(batch.req_pool_indices if batch.verify is None else batch.input_ids)


def as_decodes(batch: ModelWorkerBatch) -> ModelWorkerBatch:
    """Rows that check drafts as one row for each of their tokens.

    A layer writes all keys and values of a step before any token attends. So a token finds those
    of the drafts before it in the cache, and decodes like any other, one position further on. That
    reads a row's keys once for each of its tokens, but needs no other graphs than decodes have.
    """
    if batch.verify is None:
        return batch
    counts = batch.verify.num_drafts + 1
    behind = np.cumsum(counts) - counts
    before = batch.seq_lens - counts
    seq_lens = np.repeat(before - behind, counts) + np.arange(1, len(batch.input_ids) + 1)
    return msgspec.structs.replace(
        batch,
        req_pool_indices=np.repeat(batch.req_pool_indices, counts),
        seq_lens=seq_lens.astype(np.int32),
        sample_rows=np.arange(len(batch.input_ids), dtype=np.int32),
        verify=None,
    )


def pad_decode(batch: ModelWorkerBatch, size: int) -> ModelWorkerBatch:
    """`batch`, of decode rows that all sample, padded with further rows up to `size`.

    These are row 0's first token at KV slot 0; both are padding, so their results and writes touch
    no request.
    """
    return msgspec.structs.replace(
        batch,
        req_pool_indices=_padded(batch.req_pool_indices, size, 0),
        seq_lens=_padded(batch.seq_lens, size, 1),
        input_ids=_padded(batch.input_ids, size, 0),
        out_cache_loc=_padded(batch.out_cache_loc, size, 0),
        sample_rows=np.arange(size, dtype=np.int32),
        new_slots=[],
    )


def _padded(values: np.ndarray, size: int, padding: int) -> IntArray:
    filled = np.full(size, padding, dtype=np.int32)
    filled[: len(values)] = values
    return filled
