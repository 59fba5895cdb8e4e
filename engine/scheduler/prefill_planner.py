"""`PrefillPlanner`: which prompts, or parts of them, a step computes."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.balance import fair_share, open_places
from engine.scheduler.chunk_sizer import ChunkSizer
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.micro_batch import MicroBatch
from engine.scheduler.new_token_ratio import NewTokenRatio
from engine.scheduler.prefill_adder import Addition, AddResult, PrefillAdder
from engine.scheduler.req import Req
from engine.scheduler.requests import Requests
from engine.scheduler.schedule_policy import SchedulePolicy
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.scheduler.victims import preemption_victims

FULL_RETRY_STEPS = 16
"""Steps until requests are offered to a full batch again; `NewTokenRatio` decays meanwhile."""


class PrefillPlanner:
    """Admits waiting requests and continues the one whose prompt is partly launched."""

    def __init__(
        self,
        kv: KVManager,
        ratio: NewTokenRatio,
        sizer: ChunkSizer | None,
        policy: SchedulePolicy,
        requests: Requests,
        micro_batches: Sequence[MicroBatch],
        config: SchedulerConfig,
        stats: SchedulerStats,
    ) -> None:
        self._kv = kv
        self._ratio = ratio
        self._sizer = sizer
        self._policy = policy
        self._requests = requests
        self._shares = requests.shares
        self._micro_batches = micro_batches
        self._config = config
        self._stats = stats

    def plan(self, mb: MicroBatch, step: int, now: float) -> list[Addition]:
        """Rows of the next step, which comes after step number `step`, at time `now`."""
        requests = self._requests
        full = step < requests.full_until
        if requests.chunked is None and (full or not self._shares.may_run()):
            return []
        mixed = self._config.enable_mixed_chunk
        num_decode = len(mb.running) if mixed else 0
        decode_need = self._kv.decode_need(mb.running.seq_lens + 1) if num_decode else 0
        if decode_need > self._kv.room:
            return []
        adder = PrefillAdder(
            self._kv,
            self._ratio,
            (r for m in self._micro_batches for r in m.running.reqs),
            self._config,
            num_decode=num_decode,
            decode_need=decode_need,
            sizer=self._sizer,
        )
        if requests.chunked is not None:
            others = 0 if full else self._shares.num_others(requests.chunked)
            if adder.add_chunked(requests.chunked, parts=1 + others) is not AddResult.ADDED:
                return []
            self._shares.charge(requests.chunked, adder.additions[0].num_tokens)
            if adder.additions[0].last:
                requests.chunked = None
            elif not others:
                return adder.additions
        if not full:
            self._add_waiting(mb, adder, step, now)
        return adder.additions

    def _add_waiting(self, mb: MicroBatch, adder: PrefillAdder, step: int, now: float) -> None:
        slots = self._kv.rows.available_size()
        if len(self._micro_batches) > 1:
            held = len(mb.running) + sum(a.last for a in adder.additions)
            share = fair_share(len(self._requests.by_key), self._micro_batches)
            slots = min(slots, open_places(held, share, self._config.max_micro_batch_size))
        if slots <= 0:
            self._preempt()
            return
        chunked = self._requests.chunked
        admitted: list[Req] = []
        for req in self._shares.offers(self._policy, self._kv.match, besides=chunked):
            if len(admitted) >= slots:
                break
            alone = not admitted and not adder.additions and self._nothing_runs()
            added = adder.add(req, force=alone, whole=chunked is not None)
            if added is AddResult.DEFERRED:
                continue
            if added is AddResult.NO_TOKEN and not self._preempt_for(req):
                self._requests.full_until = step + FULL_RETRY_STEPS
            if added is not AddResult.ADDED:
                break
            self._kv.admit(req)
            self._requests.take(req, now)
            admitted.append(req)
            self._shares.charge(req, adder.additions[-1].num_tokens)
            if not adder.additions[-1].last:
                self._requests.chunked = req
                break
        if admitted:
            self._shares.forget_waiting(admitted)
        if len(admitted) >= slots:
            self._preempt()

    def _nothing_runs(self) -> bool:
        return all(not m.in_flight and len(m.running) == 0 for m in self._micro_batches)

    def _preempt(self) -> None:
        """No row is free: let some key's next request push out less important ones of the key."""
        if self._config.enable_priority_preemption:
            for req in self._shares.heads(self._policy, self._kv.match):
                if self._preempt_for(req):
                    return

    def _preempt_for(self, req: Req) -> bool:
        """Retract running requests of lower priority until `req` would fit; none if it can't.

        A later step admits `req` itself, when the room is there.
        """
        if not self._config.enable_priority_preemption or self._requests.leaving:
            return False
        for mb in self._micro_batches:
            mb.running.sync_lens()
        missing = self._kv.round_up(len(req.fill_ids) - req.cached_len + 1) - self._kv.room
        need_row = self._kv.rows.available_size() == 0
        chosen = preemption_victims(req, self._micro_batches, self._kv.held, missing, need_row)
        if not chosen:
            return False
        for victim in chosen:
            self._requests.retract(victim)
            self._stats.preemptions_total += 1
        return True
