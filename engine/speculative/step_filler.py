"""`StepFiller`: what a worker keeps of its requests in order to draft and to complete steps.

With steps in flight the scheduler knows neither the lengths nor the last tokens of its rows. It
names rows, slots and the most drafts; the worker knows the rest once the step before is sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.protocol.messages import Int64Array, IntArray, ModelWorkerBatch, SlotParams
from engine.protocol.step_parts import VerifyRows
from engine.speculative.drafter import Drafter
from engine.speculative.positions import positions
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
        self._lens = np.zeros(num_slots, np.int64)
        """Tokens in the KV cache; the last token isn't."""
        self._limits = np.zeros(num_slots, np.int64)
        """`SlotSpeculation.max_len`"""
        self._last = np.zeros(num_slots, np.int64)
        self._owners = np.zeros(num_slots, np.int64)
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

    def owners(self, batch: ModelWorkerBatch) -> Int64Array:
        """Whose tokens the sampled rows [S] of a step are, for `record`."""
        owners: Int64Array = self._owners[batch.req_pool_indices[batch.sample_rows]]
        return owners

    def record(
        self, batch: ModelWorkerBatch, owners: Int64Array, runs: Sequence[Sequence[int]]
    ) -> None:
        """Take the tokens that each sampled row of a complete step gave. Steps come in order.

        Rows whose slot has another request by now are passed over.
        """
        slots = batch.req_pool_indices[batch.sample_rows]
        before = batch.seq_lens[batch.sample_rows].astype(np.int64) - 1
        if batch.verify is not None:
            is_decode = batch.sample_rows >= batch.num_extend
            drafts = batch.verify.num_drafts[batch.sample_rows[is_decode] - batch.num_extend]
            before[is_decode] -= drafts
        current = (self._owners[slots] == owners).tolist()
        rows = zip(slots.tolist(), before.tolist(), current, runs, strict=True)
        for slot, num_before, is_current, tokens in rows:
            if not is_current or not tokens:
                continue
            self._lens[slot] = num_before + len(tokens)
            self._last[slot] = tokens[-1]
            self._drafter.observe(slot, tokens)
            if (prediction := self._predictions.get(slot)) is not None:
                prediction.observe(tokens)

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` drafts for each slot, none beyond what its request may output."""
        taken = np.asarray(slots, np.int64)
        room = self._limits[taken] - self._lens[taken] - 2
        most = np.clip(room, 0, np.asarray(counts)).tolist()
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

    def fill(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """The step with everything in it. A complete step is returned as it is."""
        verify = batch.verify
        if verify is None or verify.slots is None:
            return batch
        rows = batch.req_pool_indices[batch.num_extend :]
        assert verify.slot_starts is not None and verify.slot_counts is not None
        self._drafter.reserve(rows, verify.slot_starts, verify.slot_counts, verify.slots)
        drafts = self.propose(rows.tolist(), verify.num_drafts.tolist())
        counts = np.fromiter(map(len, drafts), np.int64, len(drafts)) + 1
        starts = self._lens[rows]
        seq_lens = batch.seq_lens.copy()
        seq_lens[batch.num_extend :] = starts + counts
        last = self._last[rows].tolist()
        inputs = [token for own, more in zip(last, drafts, strict=True) for token in (own, *more)]
        if self._agree is not None:
            self._agree(zlib.crc32(np.array([*inputs, *seq_lens.tolist()], np.int64).tobytes()))
        return msgspec.structs.replace(
            batch,
            seq_lens=seq_lens,
            input_ids=np.concatenate([batch.input_ids, np.array(inputs, np.int32)]),
            out_cache_loc=np.concatenate([batch.out_cache_loc, _slots_of(verify, starts, counts)]),
            verify=VerifyRows((counts - 1).astype(np.int32)),
        )


def _slots_of(verify: VerifyRows, starts: Int64Array, counts: Int64Array) -> IntArray:
    """KV slots int32 [sum(counts)] of the positions from starts [R] on."""
    assert verify.slots is not None
    assert verify.slot_starts is not None and verify.slot_counts is not None
    ends = np.cumsum(verify.slot_counts)
    first = ends - verify.slot_counts + starts - verify.slot_starts
    if (starts < verify.slot_starts).any() or (first + counts > ends).any():
        raise ValueError("a step has too few KV slots for its rows: lengths have gone apart")
    found: IntArray = verify.slots[positions(first, counts)]
    return found
