"""`RunningBatch`: the decodes of a micro-batch, a table of named columns kept from step to step.

Composing a decode step touches no request objects: one addition, one allocation, one message. Lists
and columns are replaced, never changed in place, so a launched step may keep them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from engine.protocol.step import ForcedRun, Int64Array, IntArray
from engine.scheduler.req import Req

BoolArray: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_NONE = np.zeros(0, np.int32)
_COLUMNS: Mapping[str, Callable[[Req], int]] = {
    "rows": lambda req: req.req_pool_idx,
    "seq_lens": lambda req: req.kv_len,
    "remaining": lambda req: req.max_new_tokens - len(req.output_ids) - 1,
    "rids": lambda req: req.rid,
    "readers": lambda req: req.reader_no,
    "last_locs": lambda req: req.last_loc,
}
"""What a request that joins has in each column."""
_DRAFT_COLUMNS: Mapping[str, Callable[[Req], int]] = {
    "most": lambda req: req.kv_len,
    "alloc": lambda req: req.kv_len,
    "limits": lambda req: req.prompt_len + req.max_new_tokens,
    "may_draft": lambda req: req.constraint is None,
    "planned": lambda req: 0,
}
"""Those of an engine that speculates, besides."""
_ADAPTER_COLUMNS: Mapping[str, Callable[[Req], int]] = {
    "adapters": lambda req: req.adapter_slot,
}
"""Those of an engine whose requests may have adapters."""


class ForcedDrafts(NamedTuple):
    """What a line's constraint leaves no choice about."""

    run: ForcedRun
    most: int
    """Drafts of the next step at most."""


NOTHING_FORCED: Mapping[int, ForcedDrafts] = MappingProxyType({})


class RunningBatch:
    """Requests whose prompt is launched and that have output left to launch. B lines.

    If the engine speculates, a step gives a line one token or several, and the scheduler learns how
    many from the result. Until then a line has a least and a most number of tokens. It gets slots
    for the most. Slots behind a rejected draft stay with the row: the next step writes there again.
    """

    def __init__(self, speculates: bool = False, has_adapters: bool = False) -> None:
        self.speculates = speculates
        self._columns = {
            **_COLUMNS,
            **(_DRAFT_COLUMNS if speculates else {}),
            **(_ADAPTER_COLUMNS if has_adapters else {}),
        }
        self.reqs: list[Req] = []
        self.rows: IntArray = _NONE
        """int32 [B]: rows of `ReqToTokenPool`."""
        self.seq_lens: IntArray = _NONE
        """int32 [B]: tokens launched into the KV cache; with drafts in flight, the least."""
        self.last_locs: IntArray = _NONE
        """int32 [B]: slot of the last launched token; not kept if the engine speculates."""
        self.remaining: IntArray = _NONE
        """int32 [B]: output tokens that may still be launched."""
        self.rids: Int64Array = np.zeros(0, np.int64)
        self.readers: IntArray = _NONE
        """int32 [B]: `Req.reader_no`."""
        self.adapters: IntArray = _NONE
        """int32 [B]: slots of the lines' adapters, -1 for none; not kept if there are none."""
        self.most: IntArray = _NONE
        """int32 [B]: tokens in the KV cache if every draft in flight is accepted."""
        self.alloc: IntArray = _NONE
        """int32 [B]: positions that have slots."""
        self.limits: IntArray = _NONE
        """int32 [B]: tokens that prompt and output may have in all."""
        self.may_draft: IntArray = _NONE
        """int32 [B]: 1, or 0 for requests whose next token depends on masks."""
        self.planned: IntArray = _NONE
        """int32 [B]: drafts of the step that is being composed."""
        self.forced: Mapping[int, ForcedDrafts] = NOTHING_FORCED
        """By row of `ReqToTokenPool`: what constraints give to this step."""
        self.num_constrained = 0
        """Number of lines whose request has a `Constraint`."""
        self.num_by_key: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        """Number of lines by the name of their request's API key: interactive, flex."""

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the next decode step."""
        return len(self.reqs) + (int(self.planned.sum()) if self.speculates else 0)

    @property
    def num_flex(self) -> int:
        """Number of lines whose request is flex."""
        return self.num_by_key[True].total()

    @property
    def flex_lines(self) -> BoolArray:
        """bool [B]: whose request is flex."""
        return np.fromiter((req.is_flex for req in self.reqs), np.bool_, len(self.reqs))

    @property
    def num_interactive_tokens(self) -> int:
        """Tokens of the next decode step, without those of flex requests."""
        if not self.num_flex:
            return self.num_tokens
        lines = ~self.flex_lines
        drafts = int(self.planned[lines].sum()) if self.speculates else 0
        return int(lines.sum()) + drafts

    @property
    def is_exact(self) -> bool:
        """Whether `seq_lens` are the lengths, not only the least ones."""
        return not self.speculates or np.array_equal(self.seq_lens, self.most)

    @property
    def targets(self) -> IntArray:
        """int32 [B]: positions for which the planned step needs slots."""
        targets: IntArray = np.minimum(self.most + self.planned + 1, self.limits)
        return targets

    def append(self, reqs: Iterable[Req]) -> None:
        """Add requests whose last prompt chunk was just launched, unless all output is launched."""
        new = [r for r in reqs if r.max_new_tokens - len(r.output_ids) > 1]
        if new:
            self._join(new, {name: list(map(of, new)) for name, of in self._columns.items()})

    def plan_drafts(
        self, most: int | IntArray, forced: Mapping[int, ForcedDrafts] = NOTHING_FORCED
    ) -> None:
        """Let the next step have at most `most` drafts a line, and none that can't be output.

        Lines whose row of `ReqToTokenPool` is in `forced` have their drafts from there.
        """
        room = self.limits - self.most - 2
        planned = np.minimum(room, most) * self.may_draft
        for line, row in enumerate(self.rows.tolist() if forced else ()):
            if row in forced:
                planned[line] = min(int(room[line]), forced[row].most)
        self.forced = forced
        self.planned = np.maximum(planned, 0, dtype=np.int32)

    def advance(self, locs: IntArray) -> None:
        """Count one more launched token of every line, at slots `locs` [B], or its drafts too.

        Lines whose whole output is launched now leave: they only wait for results.
        """
        self.seq_lens = self.seq_lens + 1
        if self.speculates:
            self.most = self.most + self.planned + 1
        else:
            self.last_locs = locs
        self.remaining = self.remaining - 1
        if not self.remaining.all():
            self._keep(self.remaining > 0)

    def learn(self, rows: IntArray, planned: IntArray, num_tokens: IntArray) -> None:
        """A step that checked drafts is back: `rows` of `ReqToTokenPool` [n] gave `num_tokens`,
        where they might have given `planned` + 1. Rows that are not here any more are ignored."""
        if len(self) == 0 or len(rows) == 0:
            return
        gained, missed = num_tokens - 1, planned + 1 - num_tokens
        if not np.array_equal(rows, self.rows):  # requests have left, or joined, since then
            size = int(max(rows.max(), self.rows.max())) + 1
            by_row = np.zeros((2, size), np.int32)
            by_row[0, rows], by_row[1, rows] = gained, missed
            gained, missed = by_row[:, self.rows]
        self.seq_lens = self.seq_lens + gained
        self.most = self.most - missed
        self.remaining = self.remaining - gained
        if (self.remaining <= 0).any():
            self._keep(self.remaining > 0)

    def remove(self, reqs: Sequence[Req]) -> None:
        """Take out requests that ended or are retracted; requests that aren't here are ignored."""
        mask = self._lines_of(reqs)
        if mask.any():
            self._keep(~mask)

    def move(self, reqs: Sequence[Req], target: RunningBatch) -> None:
        """Hand requests over to another batch. If it is another micro-batch's, none of them may be
        in a step in flight."""
        mask = self._lines_of(reqs)
        at = np.flatnonzero(mask)
        columns = {name: getattr(self, name)[at] for name in self._columns}
        target._join([self.reqs[i] for i in at.tolist()], columns)
        self._keep(~mask)

    def sync_lens(self) -> None:
        """Write the launched lengths back to the requests."""
        self._write_back(range(len(self)))

    def _join(self, reqs: list[Req], columns: Mapping[str, Sequence[int] | IntArray]) -> None:
        self.reqs = self.reqs + reqs
        for name, values in columns.items():
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.asarray(values, column.dtype)]))
        self.num_constrained += sum(r.constraint is not None for r in reqs)
        for req in reqs:
            self.num_by_key[req.is_flex][req.key_name] += 1

    def _keep(self, mask: BoolArray) -> None:
        gone = np.flatnonzero(~mask).tolist()
        self._write_back(gone)
        for req in [self.reqs[i] for i in gone]:
            self.num_constrained -= req.constraint is not None
            num_by_key = self.num_by_key[req.is_flex]
            num_by_key[req.key_name] -= 1
            if not num_by_key[req.key_name]:
                del num_by_key[req.key_name]
        kept = np.flatnonzero(mask)
        self.reqs = [self.reqs[i] for i in kept.tolist()]
        for name in self._columns:
            setattr(self, name, getattr(self, name)[kept])

    def _lines_of(self, reqs: Sequence[Req]) -> BoolArray:
        """bool [B]: which lines are those of `reqs`."""
        wanted = {id(r) for r in reqs}
        return np.fromiter((id(r) in wanted for r in self.reqs), np.bool_, len(self.reqs))

    def _write_back(self, lines: Iterable[int]) -> None:
        """Write the launched lengths of lines to their requests."""
        for i in lines:
            self.reqs[i].kv_len = int(self.seq_lens[i])
            if self.speculates:
                self.reqs[i].alloc_len = int(self.alloc[i])
