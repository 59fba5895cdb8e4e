"""Where the tokens of a step's rows lie."""

from __future__ import annotations

import numpy as np

from engine.protocol.messages import Int64Array, ModelWorkerBatch


def token_starts(batch: ModelWorkerBatch) -> Int64Array:
    """int64 [B + 1]: where each row's tokens start among the step's."""
    starts = np.ones(len(batch.req_pool_indices) + 1, dtype=np.int64)
    starts[0] = 0
    starts[1 : batch.num_extend + 1] = batch.extend_lens
    if batch.verify is not None:
        starts[batch.num_extend + 1 :] += batch.verify.num_drafts
    return np.cumsum(starts, out=starts)


def sample_counts(batch: ModelWorkerBatch) -> Int64Array:
    """int64 [S + L]: tokens that each sampled row of a step that checks drafts samples, then a 1
    for each of `PooledRows.last`."""
    assert batch.verify is not None
    if batch.num_extend == 0:
        return batch.verify.num_drafts.astype(np.int64) + 1
    pooled = 0 if batch.pooled is None else len(batch.pooled.last)
    counts = np.ones(len(batch.sample_rows) + pooled, np.int64)
    is_decode = np.flatnonzero(batch.sample_rows >= batch.num_extend)
    counts[is_decode] += batch.verify.num_drafts[batch.sample_rows[is_decode] - batch.num_extend]
    return counts
