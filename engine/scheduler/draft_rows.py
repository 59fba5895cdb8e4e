"""`DraftRows`: what the scheduler knows of running rows whose steps check drafts.

A step gives a row one token or several, and the scheduler learns how many from the result. Until
then a row has a least and a most number of tokens. It gets slots for the most. Slots behind a
rejected draft stay with the row: the next step writes there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from engine.protocol.step import ForcedRun, IntArray
from engine.scheduler.req import Req

_NONE = np.zeros(0, np.int32)


class ForcedDrafts(NamedTuple):
    """What a row's constraint leaves no choice about."""

    run: ForcedRun
    most: int
    """Drafts of the next step at most."""


NOTHING_FORCED: Mapping[int, ForcedDrafts] = MappingProxyType({})


class DraftRows:
    """Arrays [B] beside those of a `RunningBatch`, whose `seq_lens` are the least lengths."""

    def __init__(self) -> None:
        self.most: IntArray = _NONE
        """Tokens in the KV cache if every draft in flight is accepted."""
        self.alloc: IntArray = _NONE
        """Positions that have slots."""
        self.limits: IntArray = _NONE
        """Tokens that prompt and output may have in all."""
        self.may_draft: IntArray = _NONE
        """1, or 0 for rows whose next token depends on masks."""
        self.planned: IntArray = _NONE
        """Drafts of the step that is being composed."""
        self.forced: Mapping[int, ForcedDrafts] = {}
        """By row of `ReqToTokenPool`: what constraints give to this step."""

    def append(self, reqs: Sequence[Req]) -> None:
        """Requests joined."""
        n = len(reqs)
        lens = _ints((r.kv_len for r in reqs), n)
        self.most = np.concatenate([self.most, lens])
        self.alloc = np.concatenate([self.alloc, lens])
        limits = _ints((r.prompt_len + r.max_new_tokens for r in reqs), n)
        self.limits = np.concatenate([self.limits, limits])
        free = _ints((r.constraint is None for r in reqs), n)
        self.may_draft = np.concatenate([self.may_draft, free])

    def keep(self, kept: np.ndarray) -> None:
        """Only the rows with these numbers stay."""
        if len(self.planned) == len(self.most):
            self.planned = self.planned[kept]
        self.most, self.alloc = self.most[kept], self.alloc[kept]
        self.limits, self.may_draft = self.limits[kept], self.may_draft[kept]

    def take(self, source: DraftRows, at: np.ndarray) -> None:
        """Rows `at` of another micro-batch joined."""
        self.most = np.concatenate([self.most, source.most[at]])
        self.alloc = np.concatenate([self.alloc, source.alloc[at]])
        self.limits = np.concatenate([self.limits, source.limits[at]])
        self.may_draft = np.concatenate([self.may_draft, source.may_draft[at]])

    def plan(
        self,
        most: int | IntArray,
        rows: IntArray = _NONE,
        forced: Mapping[int, ForcedDrafts] = NOTHING_FORCED,
    ) -> None:
        """Let the next step have at most `most` drafts a row, and none that can't be output.

        Those of `rows` [B] of `ReqToTokenPool` that are in `forced` have their drafts from there.
        """
        room = self.limits - self.most - 2
        planned = np.minimum(room, most) * self.may_draft
        for i, row in enumerate(rows.tolist() if forced else ()):
            if row in forced:
                planned[i] = min(int(room[i]), forced[row].most)
        self.forced = forced
        self.planned = np.maximum(planned, 0, dtype=np.int32)

    @property
    def targets(self) -> IntArray:
        """Positions for which the planned step needs slots."""
        targets: IntArray = np.minimum(self.most + self.planned + 1, self.limits)
        return targets

    def advance(self) -> None:
        """The planned step was launched."""
        self.most = self.most + self.planned + 1


def _ints(values: Iterable[int], count: int) -> IntArray:
    return np.fromiter(values, np.int32, count)
