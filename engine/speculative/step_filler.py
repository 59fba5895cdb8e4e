"""`StepFiller`: what a worker keeps of its requests in order to draft and to complete steps.

With steps in flight the scheduler knows neither the lengths nor the last tokens of its rows. It
names rows, slots and the most drafts; the worker knows the rest once the step before is sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.protocol.messages import IntArray, ModelWorkerBatch, SlotParams
from engine.protocol.step_parts import VerifyRows
from engine.speculative.drafter import Drafter
from engine.speculative.prediction import PredictionFollower


class StepFiller:
    """Lengths, last tokens and drafts of the requests in a worker's slots."""

    def __init__(
        self,
        drafter: Drafter,
        num_slots: int,
        agree: Callable[[int], None] | None = None,
    ) -> None:
        """`agree` raises if tensor parallel ranks call it with different numbers."""
        self._drafter = drafter
        self._agree = agree
        # Lists: a step has few rows, and each call of numpy costs as much as a row.
        self._lens = [0] * num_slots
        """Tokens in the KV cache; the last token isn't."""
        self._limits = [0] * num_slots
        """`SlotSpeculation.max_len`"""
        self._last = [0] * num_slots
        self._owners = [0] * num_slots
        """Counts the requests that had the slot."""
        self._predictions: dict[int, PredictionFollower] = {}

    def install(self, slots: Sequence[SlotParams]) -> None:
        """Requests took slots."""
        for item in slots:
            assert item.speculation is not None and item.token_ids is not None
            slot = item.slot
            self._owners[slot] += 1
            self._limits[slot] = item.speculation.max_len
            self._predictions.pop(slot, None)
            if item.speculation.prediction is not None:
                self._predictions[slot] = PredictionFollower(
                    item.speculation.prediction.tolist(),
                    item.token_ids[item.prompt_len :].tolist(),
                )
            self._drafter.install(item)

    def owners(self, batch: ModelWorkerBatch) -> list[int]:
        """Whose tokens the sampled rows [S] of a step are, for `record`."""
        owners = self._owners
        return [owners[slot] for slot in batch.req_pool_indices[batch.sample_rows].tolist()]

    def record(
        self, batch: ModelWorkerBatch, owners: Sequence[int], runs: Sequence[Sequence[int]]
    ) -> None:
        """Take the tokens that each sampled row of a complete step gave. Steps come in order.

        Rows whose slot has another request by now are passed over.
        """
        rows = batch.sample_rows
        seq_lens = batch.seq_lens
        if batch.verify is not None:
            seq_lens = seq_lens.copy()
            seq_lens[batch.num_extend :] -= batch.verify.num_drafts
        slots, lens = batch.req_pool_indices[rows].tolist(), seq_lens[rows].tolist()
        current, observe, predictions = self._owners, self._drafter.observe, self._predictions
        for slot, length, owner, tokens in zip(slots, lens, owners, runs, strict=True):
            if not tokens or current[slot] != owner:
                continue
            self._lens[slot] = length - 1 + len(tokens)
            self._last[slot] = tokens[-1]
            observe(slot, tokens)
            if predictions and (prediction := predictions.get(slot)) is not None:
                prediction.observe(tokens)

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` drafts for each slot, none beyond what its request may output."""
        limits, lens = self._limits, self._lens
        most = [
            max(0, min(count, limits[slot] - lens[slot] - 2))
            for slot, count in zip(slots, counts, strict=True)
        ]
        if not self._predictions:
            return self._drafter.propose(slots, most)
        others = [i for i, slot in enumerate(slots) if slot not in self._predictions]
        found = self._drafter.propose([slots[i] for i in others], [most[i] for i in others])
        drafts: list[list[int]] = [[]] * len(slots)
        for i, guess in zip(others, found, strict=True):
            drafts[i] = guess
        for i, slot in enumerate(slots):
            if (prediction := self._predictions.get(slot)) is not None:
                drafts[i] = prediction.propose(most[i])
        return drafts

    def _drafts(self, slots: Sequence[int], verify: VerifyRows) -> list[list[int]]:
        """The drafts of the rows in `slots`, whether made here or given by a constraint."""
        counts: list[int] = verify.num_drafts.tolist()
        if not verify.forced:
            return self.propose(slots, counts)
        asked = [0 if row in verify.forced else count for row, count in enumerate(counts)]
        drafts = self.propose(slots, asked)
        for row, run in verify.forced.items():
            slot = slots[row]
            length, last = self._lens[slot] + 1, self._last[slot]
            drafts[row] = run.drafts(length, last, counts[row], self._limits[slot])
        return drafts

    def fill(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """The step with everything in it. A complete step is returned as it is."""
        verify = batch.verify
        if verify is None or verify.slots is None:
            return batch
        rows = batch.req_pool_indices[batch.num_extend :]
        assert verify.slot_starts is not None and verify.slot_counts is not None
        self._drafter.reserve(rows, verify.slot_starts, verify.slot_counts, verify.slots)
        slots = rows.tolist()
        drafts = self._drafts(slots, verify)
        starts = [self._lens[slot] for slot in slots]
        inputs: list[int] = []
        for slot, more in zip(slots, drafts, strict=True):
            inputs.append(self._last[slot])
            inputs += more
        seq_lens = batch.seq_lens.copy()
        lens = [start + 1 + len(more) for start, more in zip(starts, drafts, strict=True)]
        seq_lens[batch.num_extend :] = lens
        if self._agree is not None:
            self._agree(zlib.crc32(np.array([*inputs, *lens], np.int64).tobytes()))
        input_ids, locs = np.array(inputs, np.int32), _slots_of(verify, starts, lens)
        if batch.num_extend:
            input_ids = np.concatenate([batch.input_ids, input_ids])
            locs = np.concatenate([batch.out_cache_loc, locs])
        return msgspec.structs.replace(
            batch,
            seq_lens=seq_lens,
            input_ids=input_ids,
            out_cache_loc=locs,
            verify=VerifyRows(np.array([len(more) for more in drafts], np.int32)),
        )


def _slots_of(verify: VerifyRows, starts: Sequence[int], ends: Sequence[int]) -> IntArray:
    """KV slots int32 of the positions from starts [R] up to ends [R], row after row."""
    assert verify.slots is not None
    assert verify.slot_starts is not None and verify.slot_counts is not None
    found: list[IntArray] = []
    at = 0
    firsts, counts = verify.slot_starts.tolist(), verify.slot_counts.tolist()
    for start, end, first, count in zip(starts, ends, firsts, counts, strict=True):
        if start < first or end > first + count:
            raise ValueError("a step has too few KV slots for its rows: lengths have gone apart")
        found.append(verify.slots[at + start - first : at + end - first])
        at += count
    return np.concatenate(found)
