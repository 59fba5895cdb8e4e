"""`AdapterTable`: which adapters the workers have, which stand in slots, and whose turn it is.

An adapter is read into the workers' host memory when the first request asks for it, and stands in
one of `max_loras` slots while requests with it run. Where more adapters are asked for than there
are slots, they take turns: the one that has waited longest is next, and one whose turn is over
sends its running requests back to the queue. The prefix cache keeps what they computed. So a
request waits for its first token while others get a few tokens, however long their answers are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from engine.protocol.adapters import (
    AdapterLoaded,
    AdapterRef,
    AdapterSlot,
    DropAdapter,
    LoadAdapter,
)
from engine.scheduler.req import Req, ReqStatus

SHORT_TURN = 1
"""Tokens that an adapter's requests get before it gives its slot to one with a new request; one
more for every two rounds of slots that others wait for, because each change costs a step."""
LONG_TURN = 16
"""Before it gives its slot to one all of whose requests have begun their answers."""
RECOMPUTED_PER_TOKEN = 16
"""A turn is longer by a token for so many tokens that had to be computed again for it, because the
prefix cache didn't have them any more."""
MAX_TURN = 64


class _State(Enum):
    WANTED = "wanted"
    """A request asks for it, and the workers don't have it yet."""
    LOADING = "loading"
    READY = "ready"


@dataclass(eq=False)
class _Entry:
    ref: AdapterRef
    state: _State = _State.WANTED
    slot: int | None = None
    since: int = 0
    """When it began to wait for a slot."""
    is_brief: bool = False
    """It has its slot because of a new request, for which another's turn was cut short. So is its
    own."""
    is_over: bool = False
    """Its turn is over: it takes no request, and its slot is free once none runs any more."""
    waiting: dict[Req, None] = field(default_factory=dict)
    """In the order of their arrival."""
    running: dict[Req, None] = field(default_factory=dict)
    released: int = 0
    """What `turn` counts for requests that run no more."""
    is_prepared: bool = False
    """Somebody wants it to be read, though no request asks for it yet."""
    used: int = 0
    """When it was used last."""

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting and not self.is_prepared

    @property
    def has_new(self) -> bool:
        """Whether a request waits for its first token."""
        return any(not req.output_ids for req in self.waiting)

    @property
    def turn(self) -> int:
        """How long it has had its slot, in tokens of requests that followed one another; those side
        by side count once while they run. An embedding counts as a token."""
        return self.released + max(map(_num_new, self.running), default=0)

    @property
    def recomputed(self) -> int:
        """Tokens that were computed again for a request in this turn."""
        resumed = (r for r in self.running if len(r.fill_ids) > r.prompt_len)
        return max((len(r.fill_ids) - r.cached_len for r in resumed), default=0)


class AdapterTable:
    """Of one engine. Without adapters nothing of it is called for a request."""

    def __init__(self, num_slots: int, max_held: int) -> None:
        """At most `num_slots` adapters run at once; at most `max_held` are in the host's memory."""
        self._max_held = max_held
        self._entries: dict[str, _Entry] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._orders: list[LoadAdapter | DropAdapter] = []
        self._changes: list[AdapterSlot] = []
        self._known: set[Req] = set()
        """Requests with adapters, from their arrival to their end."""
        self._clock = 0
        self._prepared: dict[str, list[Callable[[str], None]]] = {}
        """By digest: who is told when the adapter is there, or why it isn't."""
        self.loads_total = self.evictions_total = self.displacements_total = 0

    # Requests come and go

    def wait(self, req: Req) -> None:
        """A request waits to run (again)."""
        ref = req.sequence.adapter
        if ref is None:
            return
        self._known.add(req)
        entry = self._entries.get(ref.digest)
        if entry is None:
            entry = self._entries[ref.digest] = _Entry(ref)
        self._touch(entry)
        if not entry.waiting:
            entry.since = entry.used
        entry.waiting[req] = None

    def run(self, req: Req) -> None:
        """A waiting request got its row."""
        if (entry := self._of(req)) is not None:
            del entry.waiting[req]
            entry.running[req] = None

    def release(self, req: Req) -> None:
        """A request gave its row back; no step in flight holds it."""
        if (entry := self._of(req)) is not None:
            del entry.running[req]
            entry.released += max(_num_new(req), 1)
            self._touch(entry)

    def forget(self, req: Req) -> None:
        """A request has ended; it may have been waiting."""
        self._known.discard(req)
        if (entry := self._of(req)) is not None:
            entry.waiting.pop(req, None)
            if entry.state is _State.WANTED and entry.is_idle:
                del self._entries[entry.ref.digest]

    def prepare(self, ref: AdapterRef, tell: Callable[[str], None]) -> None:
        """Have an adapter read before a request needs it. `tell("")` is called when it is there,
        with a reason if it can't be had."""
        entry = self._entries.get(ref.digest)
        if entry is not None and entry.state is _State.READY:
            tell("")
            return
        if entry is None:
            entry = self._entries[ref.digest] = _Entry(ref)
        entry.is_prepared = True
        self._prepared.setdefault(ref.digest, []).append(tell)
        self._touch(entry)

    # The planner asks

    def may_run(self, req: Req) -> bool:
        """Whether a waiting request's adapter lets it run now."""
        if (entry := self._of(req)) is None:
            return True
        return entry.slot is not None and not entry.is_over

    def slot_of(self, req: Req) -> int:
        """The slot of a running request's adapter; -1 if it has none."""
        entry = self._of(req)
        return -1 if entry is None or entry.slot is None else entry.slot

    @property
    def is_empty(self) -> bool:
        """Whether no request asks for an adapter."""
        return not self._known

    @property
    def is_loading(self) -> bool:
        """Whether workers are reading an adapter."""
        return any(entry.state is _State.LOADING for entry in self._entries.values())

    def give_slots(self, is_admissible: Callable[[Req], bool]) -> list[Req]:
        """Order what is lacking, and give free slots to adapters whose requests wait. Called before
        requests are chosen. `is_admissible` says whether a waiting request's API key lets it run.
        Returns running requests that have to go back to the queue, because their adapter's turn is
        over."""
        if not self._known and not self._prepared:
            return []
        may_run = {
            entry: any(map(is_admissible, entry.waiting)) for entry in self._entries.values()
        }
        asked = [entry for entry, may in may_run.items() if may or entry.is_prepared]
        asked.sort(key=lambda entry: entry.since)
        unread: list[_Entry] = []
        for entry in [e for e in asked if e.state is _State.WANTED]:
            if unread or not self._make_place(entry):
                unread.append(entry)
                continue
            entry.state = _State.LOADING
            self._orders.append(LoadAdapter(entry.ref))
        claims = [e for e in asked if e.state is _State.READY and e.slot is None and may_run[e]]
        self._grant(claims, may_run)
        found = self._end_turns([*claims, *unread])
        self._grant(claims, may_run)  # one whose turn is over may have no running request
        return found

    def _grant(self, claims: list[_Entry], may_run: Mapping[_Entry, bool]) -> None:
        """Give free slots to the first of `claims`, which leave the list."""
        while claims and (found := self._take_slot(may_run)) is not None:
            entry = claims.pop(0)
            entry.slot, was_taken = found
            entry.released, entry.is_brief = 0, was_taken and entry.has_new
            self._changes.append(AdapterSlot(entry.slot, entry.ref.digest))

    def _end_turns(self, claims: list[_Entry]) -> list[Req]:
        """End the turns of as many adapters as wait for a slot. Returns running requests of those
        whose turn is over, but none whose prompt isn't computed yet."""
        in_slots = [entry for entry in self._entries.values() if entry.slot is not None]
        if not claims:
            for entry in in_slots:
                entry.is_over = False
            return []
        short = min(SHORT_TURN + len(claims) // max(2 * len(in_slots), 1), LONG_TURN)
        turns = {entry: entry.turn for entry in in_slots if not entry.is_over}
        for at in range(len(in_slots) - len(turns), len(claims)):
            # Those before a new request in the queue have to run before it.
            has_new = any(claim.has_new for claim in claims[at:])
            done = []
            for entry, turn in turns.items():
                wanted = short if has_new or entry.is_brief else LONG_TURN
                wanted += entry.recomputed // RECOMPUTED_PER_TOKEN
                if turn >= min(wanted, MAX_TURN):
                    done.append(entry)
            if not done:
                break
            entry = max(done, key=turns.__getitem__)
            del turns[entry]
            entry.is_over = True
            self.displacements_total += 1
        over = [entry for entry in in_slots if entry.is_over]
        return [req for entry in over for req in entry.running if _may_leave(req)]

    # The loop's side

    def take_orders(self) -> list[LoadAdapter | DropAdapter]:
        """For the workers, before the next step."""
        orders, self._orders = self._orders, []
        return orders

    def take_changes(self) -> list[AdapterSlot] | None:
        """`ModelWorkerBatch.adapter_slots` of the next step."""
        changes, self._changes = self._changes, []
        return changes or None

    def loaded(self, answer: AdapterLoaded) -> list[Req]:
        """Workers have an adapter, or can't have it: the requests that have to end then."""
        entry = self._entries[answer.digest]
        entry.is_prepared = False
        for tell in self._prepared.pop(answer.digest, ()):
            tell(answer.error)
        if not answer.error:
            entry.state = _State.READY
            self.loads_total += 1
            return []
        self._orders.append(DropAdapter(answer.digest))  # other ranks may have it
        del self._entries[answer.digest]
        return list(entry.waiting)

    @property
    def num_held(self) -> int:
        """Adapters in the workers' host memory."""
        return sum(entry.state is _State.READY for entry in self._entries.values())

    @property
    def num_running(self) -> int:
        """Adapters that have a slot."""
        return sum(entry.slot is not None for entry in self._entries.values())

    @property
    def num_blocked(self) -> int:
        """Requests whose adapter has no slot."""
        return sum(len(e.waiting) for e in self._entries.values() if e.slot is None)

    def check(self) -> str | None:
        """What is wrong, or None: a slot is free or one adapter's, and who waits is known."""
        held = [entry.slot for entry in self._entries.values() if entry.slot is not None]
        if len({*held, *self._free}) != len(held) + len(self._free):
            return f"slot leak: adapters have {held}, and {self._free} are free"
        waiting = {req for entry in self._entries.values() for req in entry.waiting}
        if not waiting <= self._known:
            return f"adapter leak: {len(waiting)} requests wait, {len(self._known)} are known"
        return None

    def _of(self, req: Req) -> _Entry | None:
        ref = req.sequence.adapter
        return None if ref is None else self._entries.get(ref.digest)

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used = self._clock

    def _take_slot(self, may_run: Mapping[_Entry, bool]) -> tuple[int, bool] | None:
        """A free slot, if need be that of the adapter that was idle longest; whether its turn was
        ended for this. `may_run`: whether a waiting request of an adapter could run."""
        if self._free:
            return self._free.pop(), False
        free = [
            entry
            for entry in self._entries.values()
            if entry.slot is not None
            and not entry.running
            and (entry.is_over or not may_run.get(entry))
        ]
        if not free:
            return None
        victim = min(free, key=lambda entry: (bool(entry.waiting), entry.used))
        slot, was_over = victim.slot, victim.is_over
        assert slot is not None
        self._give_up(victim)
        return slot, was_over

    def _give_up(self, entry: _Entry) -> None:
        """An adapter is in no slot any more, and waits behind the others if it waits."""
        entry.slot, entry.is_over = None, False
        self._touch(entry)
        entry.since = entry.used

    def _make_place(self, wanted: _Entry) -> bool:
        """Have room in the host's memory for `wanted`; False if there is none. If need be one makes
        way that has had its turn since `wanted` waits; it is read again when its turn comes."""
        held = [e for e in self._entries.values() if e.state in (_State.LOADING, _State.READY)]
        if len(held) < self._max_held:
            return True
        still = [e for e in held if e.state is _State.READY and not e.running and not e.is_prepared]
        idle = [entry for entry in still if not entry.waiting]
        if idle:
            victim = min(idle, key=lambda entry: entry.used)
        else:
            had_turn = [
                e for e in still if (e.slot is None and e.since > wanted.since) or e.is_over
            ]
            if not had_turn:
                return False
            victim = max(had_turn, key=lambda entry: (entry.is_over, entry.since))
        digest = victim.ref.digest
        if victim.slot is not None:
            self._free.append(victim.slot)
        # It may have got its slot just now, and no step has told the workers.
        self._changes = [change for change in self._changes if change.digest != digest]
        victim.state = _State.WANTED
        self._give_up(victim)
        if not victim.waiting:
            del self._entries[digest]
        self._orders.append(DropAdapter(digest))
        self.evictions_total += 1
        return True


def _may_leave(req: Req) -> bool:
    """Whether a request whose adapter's turn is over goes back to the queue now: not before its
    prompt is computed, so that no prompt is begun for ever; an embedding ends then by itself."""
    return req.status is ReqStatus.RUNNING and not req.needs_prefill and req.pooling is None


def _num_new(req: Req) -> int:
    """Tokens that a running request got since it was admitted last."""
    return req.prompt_len + len(req.output_ids) - len(req.fill_ids)
