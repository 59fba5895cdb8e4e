"""`PrefillPlanner`: which prompts, or parts of them, a step computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.scheduler.balance import fair_share, open_places
from engine.scheduler.chunk_sizer import ChunkSizer
from engine.scheduler.key_shares import KeyShare
from engine.scheduler.micro_batch import MicroBatch
from engine.scheduler.new_token_ratio import NewTokenRatio
from engine.scheduler.prefill_adder import Addition, AddResult, PrefillAdder, window_room
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.requests import Requests
from engine.scheduler.schedule_policy import SchedulePolicy
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.victims import preemption_victims

FULL_RETRY_STEPS = 16
"""Steps until requests are offered to a full batch again; `NewTokenRatio` decays meanwhile."""
MAX_MISFITS = 8
"""Requests of a key that a step looks at in vain: they don't fit beside a prompt in chunks."""
GIVE_WAY_CHUNKS = 2
"""A prompt in chunks gives way to another key's long one with credit for so many more chunks."""


@dataclass(slots=True)
class _Round:
    """The turns of one step."""

    mb: MicroBatch
    adder: PrefillAdder
    step: int
    now: float
    full: bool
    """No waiting request is looked at."""
    turns: list[KeyShare]
    """Keys that may still have turns."""
    unfinished: Req | None
    """The request whose prompt is partly launched, until it has had its turn."""
    budget: int
    """Prompt tokens that fit the empty step."""
    slots: int | None = None
    """Requests that may be admitted; None: not counted yet."""
    queues: dict[KeyShare, Iterator[Req]] = field(default_factory=dict)
    misfits: Counter[KeyShare] = field(default_factory=Counter)
    admitted: list[Req] = field(default_factory=list)


class PrefillPlanner:
    """Admits waiting requests and continues the one whose prompt is partly launched."""

    def __init__(
        self,
        requests: Requests,
        config: SchedulerConfig,
        policy: SchedulePolicy,
        ratio: NewTokenRatio,
        sizer: ChunkSizer | None,
    ) -> None:
        self._requests = requests
        self._shares = requests.shares
        self._kv = requests.kv
        self._config = config
        self._policy = policy
        self._ratio = ratio
        self._sizer = sizer
        self._held_up: Req | None = None
        """A waiting prompt, longer than a step, that another key's prompt in chunks held up."""

    def plan(self, mb: MicroBatch, step: int, now: float) -> list[Addition]:
        """Rows of the next step, which comes after step number `step`, at time `now`."""
        requests = self._requests
        if requests.adapters is not None:
            shares = self._shares
            while over := requests.adapters.give_slots(lambda req: shares.of(req).may_run):
                for req in over:
                    req.queue_deadline = None  # there was capacity for it
                    requests.retract(req)
        full = step < requests.full_until
        if requests.chunked is not None and self._held_up is not None:
            self._make_way(requests.chunked, self._held_up)
        if requests.chunked is None and (full or not self._shares.may_run()):
            return []
        mixed = self._config.engine.enable_mixed_chunk
        num_decode = mb.running.num_tokens if mixed else 0
        decode_need = self._kv.decode_need(mb.running) if num_decode else 0
        if decode_need > self._kv.room_now:
            return []
        adder = PrefillAdder(
            self._kv,
            self._ratio,
            (r for m in self._requests.micro_batches for r in m.running.reqs),
            self._config,
            num_decode=num_decode,
            decode_need=decode_need,
            sizer=self._sizer,
        )
        turns = [] if full else self._shares.ready()
        if requests.chunked is not None:
            adder.reserve(requests.chunked)
            if (share := self._shares.of(requests.chunked)) not in turns:
                turns.append(share)
        self._fill(_Round(mb, adder, step, now, full, turns, requests.chunked, adder.rem_chunk))
        return adder.additions

    def _fill(self, round_: _Round) -> None:
        """Let the keys take turns until the step is full or nobody has a request for it."""
        while round_.turns:
            share = self._shares.next(round_.turns)
            if round_.unfinished is not None and share is self._shares.of(round_.unfinished):
                self._continue(round_, share, round_.unfinished)
            else:
                self._offer(round_, share)
        if round_.admitted:
            self._shares.forget_waiting(round_.admitted)
        if round_.slots is not None and len(round_.admitted) >= round_.slots:
            self._preempt()

    def _continue(self, round_: _Round, share: KeyShare, req: Req) -> None:
        """A key's turn goes to its request whose prompt is partly launched; others wait for it."""
        round_.unfinished = None
        if round_.adder.add_chunked(req) is AddResult.ADDED:
            addition = round_.adder.additions[-1]
            self._shares.charge(share, addition.num_tokens)
            if addition.last:
                self._requests.chunked = None
        if self._requests.chunked is not None or round_.full or not share.may_run:
            round_.turns.remove(share)

    def _offer(self, round_: _Round, share: KeyShare) -> None:
        """A key's turn goes to its next waiting request."""
        adder, requests = round_.adder, self._requests
        if round_.slots is None:
            round_.slots = self._open_slots(round_)
        if round_.slots <= 0:
            self._end_waiting(round_)
            return
        if share not in round_.queues:
            round_.queues[share] = self._in_order(share)
        req = next(round_.queues[share], None)
        if req is None:
            round_.turns.remove(share)
            return
        if len(round_.admitted) == round_.slots:
            self._end_waiting(round_)
            return
        beside = requests.chunked is not None
        alone = not beside and not adder.additions and self._nothing_runs()
        added = adder.add(req, force=alone, whole=beside)
        if added is AddResult.ADDED:
            self._admit(round_, share, req)
        elif added is AddResult.NO_TOKEN:
            if not self._preempt_for(req):
                requests.full_until = round_.step + FULL_RETRY_STEPS
            self._end_waiting(round_)
        elif added is AddResult.OTHER and not beside:
            self._end_waiting(round_)
        elif added is AddResult.OTHER:
            if not round_.misfits[share] and len(req.fill_ids) - req.cached_len > round_.budget:
                self._held_up = req
            round_.misfits[share] += 1
            if round_.misfits[share] == MAX_MISFITS:
                round_.turns.remove(share)

    def _admit(self, round_: _Round, share: KeyShare, req: Req) -> None:
        addition = round_.adder.additions[-1]
        self._kv.admit(req)
        self._requests.take(req, round_.now)
        round_.admitted.append(req)
        self._shares.charge(share, addition.num_tokens)
        req.keeps_place |= req.cached_len < req.gave_way_at
        if not addition.last:
            self._requests.chunked = req
            self._end_waiting(round_)
        elif not share.may_run:
            round_.turns.remove(share)

    def _end_waiting(self, round_: _Round) -> None:
        """No waiting request gets a turn in this step any more."""
        unfinished = round_.unfinished
        round_.turns = [] if unfinished is None else [self._shares.of(unfinished)]
        round_.full = True

    def _open_slots(self, round_: _Round) -> int:
        slots = self._kv.rows.available_size()
        if len(self._requests.micro_batches) > 1:
            ends = sum(a.last for a in round_.adder.additions)
            held = len(round_.mb.running) + ends + (round_.unfinished is not None)
            share = fair_share(len(self._requests.by_key), self._requests.micro_batches)
            slots = min(slots, open_places(held, share, self._config.max_micro_batch_size))
        return slots

    def _make_way(self, chunked: Req, held_up: Req) -> None:
        """Send the request whose prompt is in chunks back to the queue, if another key's long
        prompt has much more credit. What is computed stays in the prefix cache.

        A request that lost computed tokens that way doesn't give way again, so that two requests
        can't push each other out for ever.
        """
        self._held_up = None
        if chunked.keeps_place or chunked.needs_whole_prompt or not self._kv.enable_prefix_cache:
            return
        if held_up.status is not ReqStatus.WAITING:
            return
        share, other = self._shares.of(chunked), self._shares.of(held_up)
        lead = GIVE_WAY_CHUNKS * (self._config.chunk_size or 0)
        if share is other or not other.may_run or other.credit - share.credit < lead:
            return
        if self._kv.rows.available_size() == 0 or self._kv.room < len(held_up.fill_ids):
            return
        chunked.gave_way_at = chunked.kv_len
        chunked.queue_deadline = None  # there was capacity for it
        self._requests.retract(chunked)

    def _missing_in_windows(self, req: Req) -> int:
        """Tokens that layers with windows lack for it; not above 0 if they have enough."""
        running = [r for m in self._requests.micro_batches for r in m.running.reqs]
        needed = self._kv.expected_in_windows(0, len(req.fill_ids) + self._ratio.reserve(req))
        return needed - window_room(self._kv, self._ratio, running) if needed else 0

    def _in_order(self, share: KeyShare) -> Iterator[Req]:
        """Waiting requests of a key that may run, in the order of the policy."""
        adapters, queue = self._requests.adapters, share.waiting
        if adapters is not None and not adapters.is_empty:
            queue = [req for req in queue if adapters.may_run(req)]
        return _in_order(queue, self._policy, self._kv.match)

    def _nothing_runs(self) -> bool:
        return all(not m.in_flight and len(m.running) == 0 for m in self._requests.micro_batches)

    def _preempt(self) -> None:
        """No row is free: let some key's next request push out less important ones of the key."""
        if self._config.engine.enable_priority_preemption:
            for share in self._shares.ready():
                req = next(self._in_order(share), None)
                if req is not None and self._preempt_for(req):
                    return

    def _preempt_for(self, req: Req) -> bool:
        """Retract running requests of lower priority until `req` would fit; none if it can't.

        A later step admits `req` itself, when the room is there.
        """
        if not self._config.engine.enable_priority_preemption or self._requests.leaving:
            return False
        for mb in self._requests.micro_batches:
            mb.running.sync_lens()
        missing = self._kv.round_up(len(req.fill_ids) - req.cached_len + 1) - self._kv.room
        need_row = self._kv.rows.available_size() == 0
        chosen = preemption_victims(
            req,
            self._requests.micro_batches,
            [
                (missing, self._kv.held),
                (
                    self._missing_in_windows(req),
                    lambda r: self._kv.held_in_windows(r.prompt_len + len(r.output_ids)),
                ),
            ],
            need_row,
        )
        if not chosen:
            return False
        for victim in chosen:
            self._requests.retract(victim)
            self._requests.stats.preemptions_total += 1
        return True


def _in_order(
    queue: list[Req], policy: SchedulePolicy, match: Callable[[Req], None]
) -> Iterator[Req]:
    """Waiting requests of a key in the order of the policy, each matched before it comes."""
    matched = policy.sort(queue, match)
    for req in queue:
        if not matched:
            req.begin_round()
            match(req)
        yield req
