"""`RunningBatch`: the decode rows of a micro-batch, as arrays kept from step to step.

Composing a decode step touches no request objects: one addition, one allocation, one message.
Lists and arrays are replaced, never changed in place, so a launched step may keep them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from engine.protocol.step import Int64Array, IntArray
from engine.scheduler.draft_rows import DraftRows
from engine.scheduler.req import Req

_NONE = np.zeros(0, np.int32)


class RunningBatch:
    """Requests whose prompt is launched and that have output left to launch. B rows."""

    def __init__(self, drafts: DraftRows | None = None) -> None:
        """`drafts` is set if the engine speculates."""
        self.drafts = drafts
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
        self.num_constrained = 0
        """Number of rows whose request has a `Constraint`."""
        self.num_by_key: Counter[str] = Counter()
        """Number of rows by the name of their request's API key."""

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the next decode step."""
        return len(self.reqs) + (0 if self.drafts is None else int(self.drafts.planned.sum()))

    @property
    def is_exact(self) -> bool:
        """Whether `seq_lens` are the lengths, not only the least ones."""
        return self.drafts is None or np.array_equal(self.seq_lens, self.drafts.most)

    def append(self, reqs: Sequence[Req], last_locs: Sequence[int]) -> None:
        """Add requests whose last prompt chunk was just launched, unless all output is launched."""
        fresh = [
            (r, loc)
            for r, loc in zip(reqs, last_locs, strict=True)
            if r.max_new_tokens - len(r.output_ids) > 1
        ]
        if not fresh:
            return
        new = [r for r, _ in fresh]
        n = len(new)
        self.reqs = self.reqs + new
        self.rows = np.concatenate([self.rows, _ints((r.req_pool_idx for r in new), n)])
        self.seq_lens = np.concatenate([self.seq_lens, _ints((r.kv_len for r in new), n)])
        self.last_locs = np.concatenate([self.last_locs, _ints((loc for _, loc in fresh), n)])
        left = _ints((r.max_new_tokens - len(r.output_ids) - 1 for r in new), n)
        self.remaining = np.concatenate([self.remaining, left])
        self.rids = np.concatenate([self.rids, np.fromiter((r.rid for r in new), np.int64, n)])
        self.readers = np.concatenate([self.readers, _ints((r.reader_no for r in new), n)])
        self.num_constrained += sum(r.constraint is not None for r in new)
        self.num_by_key.update(r.key_name for r in new)
        if self.drafts is not None:
            self.drafts.append(new)

    def advance(self, locs: IntArray) -> None:
        """Count one more launched token of every row, at slots `locs` [B], or its drafts too.

        Rows whose whole output is launched now leave: they only wait for results.
        """
        self.seq_lens = self.seq_lens + 1
        if self.drafts is None:
            self.last_locs = locs
        else:
            self.drafts.advance()
        self.remaining = self.remaining - 1
        if not self.remaining.all():
            self._keep(self.remaining > 0)

    def learn(self, rows: IntArray, planned: IntArray, num_tokens: IntArray) -> None:
        """A step that checked drafts is back: `rows` of `ReqToTokenPool` [n] gave `num_tokens`,
        where they might have given `planned` + 1. Rows that are not here any more are ignored."""
        if self.drafts is None or len(self) == 0 or len(rows) == 0:
            return
        gained, missed = num_tokens - 1, planned + 1 - num_tokens
        if not np.array_equal(rows, self.rows):  # rows have left, or joined, since then
            size = int(max(rows.max(), self.rows.max())) + 1
            by_row = np.zeros((2, size), np.int32)
            by_row[0, rows], by_row[1, rows] = gained, missed
            gained, missed = by_row[:, self.rows]
        self.seq_lens = self.seq_lens + gained
        self.drafts.most = self.drafts.most - missed
        self.remaining = self.remaining - gained
        if (self.remaining <= 0).any():
            self._keep(self.remaining > 0)

    def remove(self, reqs: Sequence[Req]) -> None:
        """Take out requests that ended or are retracted; requests that aren't here are ignored."""
        gone = {id(r) for r in reqs}
        keep = np.fromiter((id(r) not in gone for r in self.reqs), np.bool_, len(self.reqs))
        if not keep.all():
            self._keep(keep)

    def move(self, reqs: Sequence[Req], target: RunningBatch) -> None:
        """Hand requests over to another micro-batch; none of them may be in a step in flight."""
        moving = {id(r) for r in reqs}
        mask = np.fromiter((id(r) in moving for r in self.reqs), np.bool_, len(self.reqs))
        at = np.flatnonzero(mask)
        moved = [self.reqs[i] for i in at.tolist()]
        target.reqs = target.reqs + moved
        target.rows = np.concatenate([target.rows, self.rows[at]])
        target.seq_lens = np.concatenate([target.seq_lens, self.seq_lens[at]])
        target.last_locs = np.concatenate([target.last_locs, self.last_locs[at]])
        target.remaining = np.concatenate([target.remaining, self.remaining[at]])
        target.rids = np.concatenate([target.rids, self.rids[at]])
        target.readers = np.concatenate([target.readers, self.readers[at]])
        target.num_constrained += sum(r.constraint is not None for r in moved)
        target.num_by_key.update(r.key_name for r in moved)
        if target.drafts is not None and self.drafts is not None:
            target.drafts.take(self.drafts, at)
        self._keep(~mask)

    def sync_lens(self) -> None:
        """Write the launched lengths back to the requests."""
        for req, length in zip(self.reqs, self.seq_lens.tolist(), strict=True):
            req.kv_len = length
        if self.drafts is not None:
            for req, length in zip(self.reqs, self.drafts.alloc.tolist(), strict=True):
                req.alloc_len = length

    def _keep(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        for i in np.flatnonzero(~mask).tolist():
            self.reqs[i].kv_len = int(self.seq_lens[i])
            if self.drafts is not None:
                self.reqs[i].alloc_len = int(self.drafts.alloc[i])
            if self.reqs[i].constraint is not None:
                self.num_constrained -= 1
            self._uncount(self.reqs[i].key_name)
        kept = np.flatnonzero(mask)
        self.reqs = [self.reqs[i] for i in kept.tolist()]
        self.rows = self.rows[kept]
        self.seq_lens = self.seq_lens[kept]
        self.last_locs = self.last_locs[kept]
        self.remaining = self.remaining[kept]
        self.rids = self.rids[kept]
        self.readers = self.readers[kept]
        if self.drafts is not None:
            self.drafts.keep(kept)

    def _uncount(self, key_name: str) -> None:
        self.num_by_key[key_name] -= 1
        if not self.num_by_key[key_name]:
            del self.num_by_key[key_name]


def _ints(values: Iterable[int], count: int) -> IntArray:
    return np.fromiter(values, np.int32, count)
