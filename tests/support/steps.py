"""Step messages made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.protocol.step import ModelWorkerBatch, SampleMasks

NONE = np.zeros(0, np.int32)


def decode_step(
    step: int,
    rows: Sequence[int],
    *,
    micro_batch: int = 0,
    delayed: bool = False,
    length: int = 5,
) -> ModelWorkerBatch:
    """One decode of request `rows`, each with `length` tokens; every row is sampled."""
    n = len(rows)
    return ModelWorkerBatch(
        step,
        micro_batch,
        np.asarray(rows, np.int32),
        np.ones(n, np.int32),
        np.ones(n, np.int32),
        np.full(n, length, np.int32),
        np.full(n, -1, np.int32),
        np.arange(n, dtype=np.int32),
        NONE,
        NONE,
        NONE,
        [],
        delayed_sample=delayed,
    )


def no_masks(step: int) -> SampleMasks:
    """The masks of a delayed sample that forbids nothing."""
    return SampleMasks(step, NONE, np.zeros((0, 4), np.uint32))
