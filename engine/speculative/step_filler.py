"""`StepFiller`: what a worker keeps of its requests in order to draft and to complete steps.

With steps in flight the scheduler knows neither the lengths nor the last tokens of its lines. It
names rows, KV slots and the most drafts; the worker knows the rest once the step before is sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from engine.protocol.step import (
    ForcedRun,
    IntArray,
    LateLines,
    ModelWorkerBatch,
    RowParams,
)
from engine.speculative.drafter import Drafter
from engine.speculative.prediction import PredictionFollower


class StepFiller:
    """Lengths, last tokens and drafts of the requests in a worker's rows."""

    def __init__(
        self,
        drafter: Drafter,
        num_rows: int,
        agree: Callable[[int], None] | None = None,
    ) -> None:
        """`agree` raises if tensor parallel ranks call it with different numbers."""
        self._drafter = drafter
        self._agree = agree
        # Lists: a step has few lines, and each call of numpy costs as much as a line.
        self._lens = [0] * num_rows
        """Tokens in the KV cache; the last token isn't."""
        self._limits = [0] * num_rows
        """`RowSpeculation.max_len`"""
        self._last = [0] * num_rows
        self._owners = [0] * num_rows
        """Counts the requests that had the row."""
        self._predictions: dict[int, PredictionFollower] = {}

    def install(self, items: Sequence[RowParams]) -> None:
        """Requests took rows."""
        for item in items:
            assert item.speculation is not None and item.token_ids is not None
            row = item.row
            self._owners[row] += 1
            self._limits[row] = item.speculation.max_len
            self._predictions.pop(row, None)
            if item.speculation.prediction is not None:
                self._predictions[row] = PredictionFollower(
                    item.speculation.prediction.tolist(),
                    item.token_ids[item.prompt_len :].tolist(),
                )
            self._drafter.install(item)

    def owners(self, batch: ModelWorkerBatch) -> list[int]:
        """Whose tokens the sampled lines [S] of a step are, for `record`."""
        owners = self._owners
        return [owners[row] for row in batch.req_pool_indices[batch.sampled_lines].tolist()]

    def record(
        self, batch: ModelWorkerBatch, owners: Sequence[int], runs: Sequence[Sequence[int]]
    ) -> None:
        """Take the tokens that each sampled line of a complete step gave. Steps come in order.

        Lines whose row has another request by now are passed over.
        """
        lines = batch.sampled_lines
        # With all drafts but for the token that each line has in any case.
        lens = (batch.seq_lens - batch.num_sampled + 1)[lines].tolist()
        rows = batch.req_pool_indices[lines].tolist()
        current, observe, predictions = self._owners, self._drafter.observe, self._predictions
        for row, length, owner, tokens in zip(rows, lens, owners, runs, strict=True):
            if not tokens or current[row] != owner:
                continue
            self._lens[row] = length - 1 + len(tokens)
            self._last[row] = tokens[-1]
            observe(row, tokens)
            if predictions and (prediction := predictions.get(row)) is not None:
                prediction.observe(tokens)

    def propose(self, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` drafts for each row, none beyond what its request may output."""
        limits, lens = self._limits, self._lens
        most = [
            max(0, min(count, limits[row] - lens[row] - 2))
            for row, count in zip(rows, counts, strict=True)
        ]
        if not self._predictions:
            return self._drafter.propose(rows, most)
        others = [i for i, row in enumerate(rows) if row not in self._predictions]
        found = self._drafter.propose([rows[i] for i in others], [most[i] for i in others])
        drafts: list[list[int]] = [[]] * len(rows)
        for i, guess in zip(others, found, strict=True):
            drafts[i] = guess
        for i, row in enumerate(rows):
            if (prediction := self._predictions.get(row)) is not None:
                drafts[i] = prediction.propose(most[i])
        return drafts

    def _drafts(
        self, rows: Sequence[int], counts: list[int], forced: Mapping[int, ForcedRun]
    ) -> list[list[int]]:
        """At most `counts[i]` drafts for each row, made here or given by a constraint."""
        if not forced:
            return self.propose(rows, counts)
        asked = [0 if line in forced else count for line, count in enumerate(counts)]
        drafts = self.propose(rows, asked)
        for line, run in forced.items():
            row = rows[line]
            length, last = self._lens[row] + 1, self._last[row]
            drafts[line] = run.drafts(length, last, counts[line], self._limits[row])
        return drafts

    def fill(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """The step with everything in it. A complete step is returned as it is."""
        late = batch.late
        if late is None:
            return batch
        first = len(batch.req_pool_indices) - len(late.counts)
        taken = batch.req_pool_indices[first:]
        self._drafter.reserve(taken, late.starts, late.counts, late.slots)
        rows = taken.tolist()
        drafts = self._drafts(rows, (batch.num_sampled[first:] - 1).tolist(), late.forced or {})
        starts = [self._lens[row] for row in rows]
        inputs: list[int] = []
        for row, more in zip(rows, drafts, strict=True):
            inputs.append(self._last[row])
            inputs += more
        counts = np.array([1 + len(more) for more in drafts], np.int32)
        lens = np.array(starts, np.int32) + counts
        if self._agree is not None:
            self._agree(zlib.crc32(np.array([*inputs, *lens.tolist()], np.int64).tobytes()))
        return msgspec.structs.replace(
            batch,
            query_lens=np.concatenate([batch.query_lens[:first], counts]),
            num_sampled=np.concatenate([batch.num_sampled[:first], counts]),
            seq_lens=np.concatenate([batch.seq_lens[:first], lens]),
            input_ids=np.concatenate([batch.input_ids, np.array(inputs, np.int32)]),
            out_cache_loc=np.concatenate(
                [batch.out_cache_loc, _slots_of(late, starts, lens.tolist())]
            ),
            late=None,
        )


def _slots_of(late: LateLines, starts: Sequence[int], ends: Sequence[int]) -> IntArray:
    """KV slots int32 of the positions from starts [R] up to ends [R], line after line."""
    found: list[IntArray] = []
    at = 0
    firsts, counts = late.starts.tolist(), late.counts.tolist()
    for start, end, first, count in zip(starts, ends, firsts, counts, strict=True):
        if start < first or end > first + count:
            raise ValueError("a step has too few KV slots for its lines: lengths have gone apart")
        found.append(late.slots[at + start - first : at + end - first])
        at += count
    return np.concatenate(found)
