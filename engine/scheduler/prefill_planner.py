"""`PrefillPlanner`: which prompts, or parts of them, a step computes.

Interactive requests come first, as if there were no flex ones; if they lack a row or room, flex
requests give it back. Flex prompts get what is left of the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.scheduler.balance import fair_share, open_places
from engine.scheduler.chunk_sizer import ChunkSizer
from engine.scheduler.flex_pace import FlexPace, StepWork
from engine.scheduler.key_shares import KeyShare
from engine.scheduler.micro_batch import MicroBatch
from engine.scheduler.prefill_adder import Addition, AddResult, PrefillAdder, window_room
from engine.scheduler.rank import Rank
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.requests import Requests
from engine.scheduler.schedule_policy import SchedulePolicy
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.victims import flex_victims, preemption_victims

FULL_RETRY_STEPS = 16
"""Steps until requests are offered to a full batch again; `NewTokenRatio` decays meanwhile."""
MAX_MISFITS = 8
"""Requests of a key that a step looks at in vain: they don't fit beside a prompt in chunks, or are
flex requests that lack room."""
LONG_WAIT_STEPS = 1024
"""A flex request that has lacked room for so many steps gets what the prefix cache protects, too.
If others of its rank hold the room, none is admitted until it fits."""
GIVE_WAY_CHUNKS = 2
"""A prompt in chunks gives way to another key's long one with credit for so many more chunks."""
FLEX_RESERVE = 8
"""Flex requests are admitted if one row of so many, at least one, and as large a share of the KV
cache are free then. They leave again when half of that is used up."""


@dataclass(slots=True)
class _Round:
    """The turns of one step."""

    rank: Rank
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
    has_room: bool = False
    """There was room for a request that was offered."""
    admitted: list[Req] = field(default_factory=list)


class PrefillPlanner:
    """Admits waiting requests and continues those whose prompts are partly launched."""

    def __init__(
        self,
        requests: Requests,
        config: SchedulerConfig,
        policy: SchedulePolicy,
        pace: FlexPace,
        sizer: ChunkSizer | None,
    ) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._config = config
        self._policy = policy
        self._pace = pace
        self._sizer = sizer
        rows = requests.kv.rows.size
        self._reserved_rows = min(max(rows // FLEX_RESERVE, 1), rows - 1)
        self._reserved_tokens = requests.kv.total_size // FLEX_RESERVE

    def plan(self, mb: MicroBatch, step: int, now: float) -> list[Addition]:
        """Rows of the next step, which comes after step number `step`, at time `now`."""
        requests = self._requests
        if requests.adapters is not None:
            while over := requests.adapters.give_slots(
                lambda req: requests.rank_of(req).shares.of(req).may_run
            ):
                for req in over:
                    self._send_back(req)
        for rank in requests.ranks:
            if rank.chunked is not None and rank.held_up is not None:
                self._make_way(rank, rank.chunked, rank.held_up)
        if not any(_has_turn(rank, step) for rank in requests.ranks):
            return []
        mixed = self._config.engine.enable_mixed_chunk
        decode_need = self._kv.decode_need(mb.running) if mixed and len(mb.running) else 0
        if decode_need > self._kv.room_now:
            return []
        adder = PrefillAdder(
            self._kv,
            requests.interactive.ratio,
            self._running(requests.interactive),
            self._config,
            num_decode=mb.running.num_interactive_tokens if mixed else 0,
            decode_need=decode_need,
            sizer=self._sizer,
        )
        for rank in requests.ranks:
            if _has_turn(rank, step) and (not rank.is_flex or self._open_to_flex(mb, adder)):
                self._fill(self._begin(rank, mb, adder, step, now))
        return adder.additions

    def _begin(
        self, rank: Rank, mb: MicroBatch, adder: PrefillAdder, step: int, now: float
    ) -> _Round:
        full = step < rank.full_until
        turns = [] if full else rank.shares.ready()
        if rank.chunked is not None:
            adder.reserve(rank.chunked)
            if (share := rank.shares.of(rank.chunked)) not in turns:
                turns.append(share)
        return _Round(rank, mb, adder, step, now, full, turns, rank.chunked, adder.rem_chunk)

    def _running(self, rank: Rank) -> list[Req]:
        """The requests of a rank that decode."""
        batches = self._requests.micro_batches
        if not self._requests.flex.num_reqs:
            return [] if rank.is_flex else [r for m in batches for r in m.running.reqs]
        return [r for m in batches for r in m.reqs if r.is_flex == rank.is_flex]

    def _open_to_flex(self, mb: MicroBatch, adder: PrefillAdder) -> bool:
        """Let the step have prompts of flex requests too; False if there is no place for them."""
        requests, running = self._requests, mb.running
        if requests.interactive.shares.may_run() or len(mb.paused):
            return False
        own = running.num_interactive_tokens
        is_mixed = self._config.engine.enable_mixed_chunk
        rides = is_mixed or (own > 0 and not adder.additions)
        need = self._kv.decode_need(running) if rides and not is_mixed else 0
        if need > self._kv.room_now:
            return False
        if requests.interactive.num_reqs:
            self._keep_reserve(mb)
        in_use = self._kv.rows.size - self._kv.rows.available_size()
        is_alone = in_use == (requests.flex.chunked is not None)
        flex_rows = running.flex_lines
        allowed = self._pace.allowance(
            StepWork(
                own * rides + sum(a.num_tokens for a in adder.additions),
                int(running.seq_lens[~flex_rows].sum()) * rides
                + sum(a.req.kv_len + a.num_tokens for a in adder.additions),
            )
        )
        cost, context = self._pace.cost, int(running.seq_lens[flex_rows].sum())
        allowed -= (cost.token * int(flex_rows.sum()) + cost.context * context) * rides
        adder.open_to_flex(
            requests.flex.ratio,
            self._running(requests.flex),
            num_decode=(running.num_tokens - own * is_mixed) * rides,
            decode_need=need,
            kept=0 if is_alone else max(self._reserved_tokens, 1),
            most=math.inf
            if is_alone
            else max(allowed / max(cost.token + cost.context, 1e-12), 0.0),
        )
        return True

    def _keep_reserve(self, mb: MicroBatch) -> None:
        """Have flex requests leave if interactive ones have used up half of their reserve."""
        self.take_from_flex(
            mb,
            rows=self._reserved_rows // 2 - self._kv.rows.available_size(),
            tokens=self._reserved_tokens // 2 - self._kv.room,
        )

    def _fill(self, round_: _Round) -> None:
        """Let the keys take turns until the step is full or nobody has a request for it."""
        shares = round_.rank.shares
        while round_.turns:
            share = shares.next(round_.turns)
            if round_.unfinished is not None and share is shares.of(round_.unfinished):
                self._continue(round_, share, round_.unfinished)
            else:
                self._offer(round_, share)
        if round_.admitted:
            shares.forget_waiting(round_.admitted)
        if round_.misfits and not round_.has_room:
            round_.rank.full_until = round_.step + FULL_RETRY_STEPS
        if round_.slots is not None and len(round_.admitted) >= round_.slots:
            self._free_rows(round_)

    def _free_rows(self, round_: _Round) -> None:
        """No row is free for those that still wait: others may have to leave."""
        rank = round_.rank
        if not rank.is_flex:
            wanted = sum(share.num_admissible for share in rank.shares.ready())
            if self.take_from_flex(round_.mb, rows=wanted - self._kv.rows.available_size()):
                return
        self._preempt(rank)

    def _continue(self, round_: _Round, share: KeyShare, req: Req) -> None:
        """A key's turn goes to its request whose prompt is partly launched; others wait for it."""
        rank = round_.rank
        round_.unfinished = None
        added = round_.adder.add_chunked(req)
        if added is AddResult.ADDED:
            addition = round_.adder.additions[-1]
            rank.shares.charge(share, addition.num_tokens)
            if addition.last:
                rank.chunked = req.lacks_room_since = None
        elif added is AddResult.NO_TOKEN and not rank.is_flex:
            self._make_room(round_)
        elif added is AddResult.NO_TOKEN:
            _note_lack(round_, req)
            if self._kv.borrower is None and _has_waited_long(round_, req):
                self._kv.borrower = req
        if rank.chunked is not None or round_.full or not share.may_run:
            round_.turns.remove(share)

    def _offer(self, round_: _Round, share: KeyShare) -> None:
        """A key's turn goes to its next waiting request."""
        adder, rank = round_.adder, round_.rank
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
        beside = rank.chunked is not None
        if req.pooling == "mean":
            beside |= self._has_open_mean(rank)
        alone = not beside and not adder.additions and self._nothing_runs()
        borrows = self._kv.borrower is None and _has_waited_long(round_, req)
        added = adder.add(req, force=alone, whole=beside, borrows=borrows)
        round_.has_room |= added is not AddResult.NO_TOKEN
        if added is AddResult.ADDED:
            if borrows:
                self._kv.borrower = req
            self._admit(round_, share, req)
        elif added is AddResult.NO_TOKEN and rank.is_flex:
            self._pass_over(round_, share, req)
        elif added is AddResult.NO_TOKEN:
            if not self._make_room(round_) and not self._preempt_for(req):
                rank.full_until = round_.step + FULL_RETRY_STEPS
            self._end_waiting(round_)
        elif added is AddResult.OTHER and not beside:
            self._end_waiting(round_)
        elif added is AddResult.OTHER:
            if not round_.misfits[share] and len(req.fill_ids) - req.cached_len > round_.budget:
                rank.held_up = req
            self._count_misfit(round_, share)

    def _count_misfit(self, round_: _Round, share: KeyShare) -> None:
        round_.misfits[share] += 1
        if round_.misfits[share] == MAX_MISFITS:
            round_.turns.remove(share)

    def _pass_over(self, round_: _Round, share: KeyShare, req: Req) -> None:
        """A flex request lacks room: others have their turns, unless they would keep it waiting."""
        _note_lack(round_, req)
        if self._preempt_for(req):
            self._end_waiting(round_)
            return
        self._count_misfit(round_, share)
        if _has_waited_long(round_, req) and self._will_have_room(round_):
            self._end_waiting(round_)

    def _will_have_room(self, round_: _Round) -> bool:
        """Whether the request that has just lacked room has it when its rank's others are gone."""
        rank, kv = round_.rank, self._kv
        for batch in self._requests.micro_batches:
            batch.sync_lens()
        others = self._running(rank) + ([] if rank.chunked is None else [rank.chunked])
        ahead = sum(max(len(r.fill_ids) - r.kv_len, 0) + rank.ratio.reserve(r) for r in others)
        in_windows = sum(kv.held_in_windows(r.prompt_len + len(r.output_ids)) for r in others)
        return (
            round_.adder.missing <= sum(map(kv.frees, others)) + ahead
            and round_.adder.missing_in_windows <= in_windows
        )

    def _admit(self, round_: _Round, share: KeyShare, req: Req) -> None:
        addition = round_.adder.additions[-1]
        self._kv.admit(req)
        self._requests.take(req, round_.now)
        round_.admitted.append(req)
        round_.rank.shares.charge(share, addition.num_tokens)
        req.keeps_place |= req.cached_len < req.gave_way_at
        if not addition.last:
            round_.rank.chunked = req
            self._end_waiting(round_)
            return
        req.lacks_room_since = None
        if not share.may_run:
            round_.turns.remove(share)

    def _end_waiting(self, round_: _Round) -> None:
        """No waiting request gets a turn in this step any more."""
        unfinished = round_.unfinished
        round_.turns = [] if unfinished is None else [round_.rank.shares.of(unfinished)]
        round_.full = True

    def _open_slots(self, round_: _Round) -> int:
        rank, requests = round_.rank, self._requests
        slots = self._kv.rows.available_size()
        if rank.is_flex:
            slots -= self._reserved_rows
        if len(requests.micro_batches) > 1:
            ends = sum(a.last for a in round_.adder.additions)
            held = len(round_.mb.reqs) + ends + (round_.unfinished is not None)
            limit, num_reqs = self._config.max_micro_batch_size, len(requests.by_key)
            if not rank.is_flex:
                # Flex requests take no interactive one's share, but places.
                num_flex = sum(req.is_flex for req in round_.mb.reqs)
                held, limit = held - num_flex, limit - num_flex
                num_reqs -= requests.flex.num_reqs
            share = fair_share(num_reqs, requests.micro_batches)
            slots = min(slots, open_places(held, share, limit))
        return slots

    def take_from_flex(
        self, mb: MicroBatch, *, rows: int = 0, tokens: int = 0, in_windows: int = 0
    ) -> bool:
        """Send flex requests back to the queue until so many rows and tokens have become free, also
        in layers with windows, or will when steps in flight are back. Returns whether it is worth
        to look again soon: that is enough, or some have left. Those of `mb` go first."""
        requests, kv = self._requests, self._kv
        if not requests.flex.num_reqs:
            return False
        for batch in requests.micro_batches:
            batch.sync_lens()

        def is_enough() -> bool:
            return rows <= 0 and tokens <= 0 and in_windows <= 0

        def count(req: Req) -> None:
            nonlocal rows, tokens, in_windows
            rows -= req.req_pool_idx != 0
            tokens -= kv.frees(req)
            in_windows -= kv.held_in_windows(req.prompt_len + len(req.output_ids))

        for leaving in requests.leaving:
            count(leaving)
        have_left = False
        for victim in flex_victims(mb, requests.micro_batches, requests.flex.chunked):
            if is_enough():
                break
            count(victim)
            have_left = True
            self._send_back(victim)
            requests.stats.flex_retractions_total += 1
        return have_left or is_enough()

    def _make_room(self, round_: _Round) -> bool:
        """Have flex requests give the room that an interactive one has just lacked."""
        adder = round_.adder
        return not round_.rank.is_flex and self.take_from_flex(
            round_.mb, tokens=adder.missing, in_windows=adder.missing_in_windows
        )

    def _make_way(self, rank: Rank, chunked: Req, held_up: Req) -> None:
        """Send the request whose prompt is in chunks back to the queue, if another key's long
        prompt has much more credit. What is computed stays in the prefix cache.

        A request that lost computed tokens that way doesn't give way again, so that two requests
        can't push each other out for ever.
        """
        rank.held_up = None
        if chunked.keeps_place or chunked.needs_whole_prompt or not self._kv.enable_prefix_cache:
            return
        if held_up.status is not ReqStatus.WAITING:
            return
        share, other = rank.shares.of(chunked), rank.shares.of(held_up)
        lead = GIVE_WAY_CHUNKS * (self._config.chunk_size or 0)
        if share is other or not other.may_run or other.credit - share.credit < lead:
            return
        if self._kv.rows.available_size() == 0 or self._kv.room < len(held_up.fill_ids):
            return
        chunked.gave_way_at = chunked.kv_len
        self._send_back(chunked)

    def _send_back(self, req: Req) -> None:
        """To the queue, where it may wait however long: there was capacity for it."""
        req.queue_deadline = None
        self._requests.retract(req)

    def _missing_in_windows(self, req: Req) -> int:
        """Tokens that layers with windows lack for it; not above 0 if they have enough."""
        rank = self._requests.rank_of(req)
        needed = self._kv.expected_in_windows(0, len(req.fill_ids) + rank.ratio.reserve(req))
        room = window_room(self._kv, rank.ratio, self._running(rank)) if needed else 0
        return needed - room

    def _in_order(self, share: KeyShare) -> Iterator[Req]:
        """Waiting requests of a key that may run, in the order of the policy."""
        adapters, queue = self._requests.adapters, share.waiting
        if adapters is not None and not adapters.is_empty:
            queue = [req for req in queue if adapters.may_run(req)]
        return _in_order(queue, self._policy, self._kv.match)

    def _has_open_mean(self, rank: Rank) -> bool:
        """Whether a prompt of the other rank is in parts whose mean is wanted: workers keep the sum
        of one. A flex request loses it to an interactive one."""
        chunked = self._requests.ranks[not rank.is_flex].chunked
        if chunked is None or chunked.pooling != "mean":
            return False
        if chunked.is_flex:
            self._send_back(chunked)
            self._requests.stats.flex_retractions_total += 1
        return not chunked.is_flex

    def _nothing_runs(self) -> bool:
        return not self._requests.chunked and all(
            not m.in_flight and not m.reqs for m in self._requests.micro_batches
        )

    def _preempt(self, rank: Rank) -> None:
        """No row is free: let some key's next request push out less important ones of the key."""
        if self._config.engine.enable_priority_preemption:
            for share in rank.shares.ready():
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
            mb.sync_lens()
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


def _note_lack(round_: _Round, req: Req) -> None:
    if req.lacks_room_since is None:
        req.lacks_room_since = round_.step


def _has_waited_long(round_: _Round, req: Req) -> bool:
    """Whether a flex request has lacked room for long."""
    since = req.lacks_room_since
    return since is not None and round_.step - since >= LONG_WAIT_STEPS


def _has_turn(rank: Rank, step: int) -> bool:
    return rank.chunked is not None or (step >= rank.full_until and rank.shares.may_run())


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
