"""Complete steps that check drafts."""

from __future__ import annotations

import numpy as np

from engine.protocol.step import IntArray, ModelWorkerBatch

NONE = np.zeros(0, np.int32)


def ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


def verify_batch(extends: list[int], rows: list[list[int]], lens: list[int]) -> ModelWorkerBatch:
    """A step with prompts of `extends` tokens and decode rows with inputs `rows` (the last token
    and drafts), whose requests have `lens` tokens with them."""
    inputs = [9] * sum(extends) + [token for row in rows for token in row]
    lines = len(extends) + len(rows)
    counts = [len(row) for row in rows]
    return ModelWorkerBatch(
        1,
        0,
        np.arange(1, lines + 1, dtype=np.int32),
        ints([*extends, *counts]),
        ints([1] * len(extends) + counts),
        ints([*extends, *lens]),
        ints(inputs),
        np.zeros(len(inputs), np.int32),
        NONE,
        NONE,
        NONE,
        [],
    )
