"""Positions of runs of tokens."""

from __future__ import annotations

import numpy as np

from engine.protocol.step import Int64Array


def positions(starts: np.ndarray, counts: np.ndarray) -> Int64Array:
    """int64 [sum(counts)]: starts[i], starts[i] + 1, ... for each of the [n] runs."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    at: Int64Array = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return at
