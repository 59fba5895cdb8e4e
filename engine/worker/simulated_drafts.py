"""`SimulatedDrafter`: drafts of a set acceptance, for a device that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.protocol.step import IntArray, RowParams
from engine.speculative.config import SpeculativeConfig
from engine.speculative.drafter import Drafter

NextTokens = Callable[[np.ndarray, np.ndarray], IntArray]
"""(tokens [N], positions [N]) -> the tokens int32 [N] that follow."""


class SimulatedDrafter(Drafter):
    """Knows the tokens that will come, and gives a wrong one with a set probability.

    Whether a draft is right is a hash of its position and the token before it: the same on every
    rank.
    """

    def __init__(
        self, config: SpeculativeConfig, num_rows: int, acceptance: float, follow: NextTokens
    ) -> None:
        super().__init__(config)
        self._right_below = int(acceptance * 2**16)
        self._follow = follow
        self._last = np.zeros(num_rows, np.int64)
        self._lens = np.zeros(num_rows, np.int64)
        """Tokens of each request, the last one included."""

    def install(self, params: RowParams) -> None:
        assert params.token_ids is not None
        self._last[params.row] = params.token_ids[-1]
        self._lens[params.row] = len(params.token_ids)

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        self._last[row] = tokens[-1]
        self._lens[row] += len(tokens)

    def propose(self, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        taken = np.asarray(rows, np.int64)
        tokens, lens = self._last[taken], self._lens[taken]
        steps: list[np.ndarray] = []
        for _ in range(max(counts, default=0)):
            follows = self._follow(tokens, lens).astype(np.int64)
            noise = (tokens * 40503 + lens * 2654435761) >> 7 & 0xFFFF
            tokens = np.where(noise < self._right_below, follows, follows ^ 1)
            lens = lens + 1
            steps.append(tokens)
        if not steps:
            return [[] for _ in rows]
        return [row[:n] for row, n in zip(np.stack(steps, 1).tolist(), counts, strict=True)]
