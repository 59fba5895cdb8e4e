"""Complete steps that check drafts."""

from __future__ import annotations

import numpy as np

from engine.protocol.messages import ForwardMode, IntArray, ModelWorkerBatch
from engine.protocol.step_parts import VerifyRows

NONE = np.zeros(0, np.int32)


def ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


def verify_batch(extends: list[int], rows: list[list[int]], lens: list[int]) -> ModelWorkerBatch:
    """A step with prompts of `extends` tokens and decode rows with inputs `rows` (the last token
    and drafts), whose requests have `lens` tokens with them."""
    inputs = [9] * sum(extends) + [token for row in rows for token in row]
    count = len(extends) + len(rows)
    return ModelWorkerBatch(
        1,
        0,
        ForwardMode.VERIFY,
        len(extends),
        np.arange(1, count + 1, dtype=np.int32),
        ints([*extends, *lens]),
        ints(extends),
        ints(inputs),
        np.zeros(len(inputs), np.int32),
        NONE,
        NONE,
        NONE,
        np.arange(count, dtype=np.int32),
        [],
        verify=VerifyRows(ints([len(row) - 1 for row in rows])),
    )
