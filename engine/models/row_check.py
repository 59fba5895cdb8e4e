"""Whether a request that comes in parts is the same as one that comes whole, tried on a model."""

from __future__ import annotations

import numpy as np
import torch

from engine.models.row_steps import RowSteps
from engine.models.transformers_model import difference

NUM_ROWS = 4
"""Of the pool that the checks need."""
ROUNDING = {torch.float32: 5e-2}
"""By how much parts and whole may differ, relative to the largest number. It is that much because
some code bounds a step of time in chunks and not in decodes."""
ROUNDING_16_BITS = 0.15
_FIRST = 3
"""Tokens of the first part."""


def continues_chunks(steps: RowSteps) -> bool:
    """Whether several tokens at once continue the recurrent state before them. (transformers' code
    of the first Mamba begins anew.)"""
    kinds = [spec.kind for spec in steps.pool.specs]
    if "recurrent" not in kinds:
        return True
    last = len(kinds) - 1 - kinds[::-1].index("recurrent")
    row = np.array([1])
    tokens = torch.arange(_FIRST + 2, device=steps.pool.device)[None]
    steps.call(row, 0, tokens[:, :_FIRST], tokens[:, :_FIRST])
    state = steps.pool.take(row)[last].fill_(torch.nan)
    hidden = steps.call(row, _FIRST, tokens[:, _FIRST:], tokens[:, _FIRST:])
    return bool(state.isnan().any() or hidden.isnan().any())


def difference_of_parts(steps: RowSteps, vocab_size: int) -> float:
    """The largest difference of a token's hidden state, and of the states behind it, between a
    request that comes whole and one that comes as two chunks and then as a decode beside another's.
    Relative to the largest number."""
    sizes = [_FIRST, 2] if steps.continues_chunks else [_FIRST, 1, 1]
    positions = torch.arange(sum(sizes) + 1, device=steps.pool.device)[None]
    ids = positions % vocab_size
    others = (ids + 7) % vocab_size
    whole = steps.call(np.array([1]), 0, ids, positions)
    steps.call(np.array([2]), 0, others[:, :-1], positions[:, :-1])
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        steps.call(np.array([3]), start, ids[:, part], positions[:, part])
        start += size
    last = torch.cat([ids[:, -1:], others[:, -1:]])
    decoded = steps.call(np.array([3, 2]), start, last, positions[:, -1:].expand(2, 1))
    states = (steps.pool.take(np.array([row])) for row in (3, 1))
    pairs = [(decoded[0, -1], whole[0, -1]), *zip(*states, strict=True)]
    return float(torch.tensor([difference(a, b) for a, b in pairs]).max())  # NaN, if one is
