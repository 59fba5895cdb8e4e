"""`AdapterTable`: which adapters the workers have, which stand in slots, and whose turn it is.

An adapter is read into the workers' host memory when the first request asks for it, and stands in
one of `max_loras` slots while requests with it run. Where more adapters are asked for than there
are slots, each gets one in turn: once an adapter waits for a slot, those in slots only take
requests that came before that, so that they run empty. The one whose request has waited longest is
next. So requests are served in the order of their arrival, as far as slots allow, and none waits
for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from engine.protocol.adapters import (
    AdapterLoaded,
    AdapterRef,
    AdapterSlot,
    DropAdapter,
    LoadAdapter,
)
from engine.scheduler.req import Req


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
    last_number: int = 0
    """While others wait for a slot, it takes requests up to this number."""
    waiting: dict[Req, int] = field(default_factory=dict)
    """Their numbers, in the order of their arrival."""
    num_running: int = 0
    is_prepared: bool = False
    """Somebody wants it to be read, though no request asks for it yet."""
    used: int = 0
    """When it was used last."""

    @property
    def oldest(self) -> float:
        return min(self.waiting.values(), default=math.inf)

    @property
    def is_idle(self) -> bool:
        return not self.num_running and not self.waiting and not self.is_prepared


class AdapterTable:
    """Of one engine. Without adapters nothing of it is called for a request."""

    def __init__(self, num_slots: int, max_held: int) -> None:
        """At most `num_slots` adapters run at once; at most `max_held` are in the host's memory."""
        self._max_held = max_held
        self._entries: dict[str, _Entry] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._orders: list[LoadAdapter | DropAdapter] = []
        self._changes: list[AdapterSlot] = []
        self._numbers: dict[Req, int] = {}
        self._count = self._clock = 0
        self._prepared: dict[str, list[Callable[[str], None]]] = {}
        """By digest: who is told when the adapter is there, or why it isn't."""
        self._contended = False
        """Whether an adapter that the workers have waits for a slot."""
        self.loads_total = self.evictions_total = 0

    # Requests come and go

    def wait(self, req: Req) -> None:
        """A request waits to run (again). One that was retracted keeps its place."""
        ref = req.sequence.adapter
        if ref is None:
            return
        if req not in self._numbers:
            self._count += 1
            self._numbers[req] = self._count
        entry = self._entries.get(ref.digest)
        if entry is None:
            entry = self._entries[ref.digest] = _Entry(ref)
        entry.waiting[req] = self._numbers[req]
        self._touch(entry)

    def run(self, req: Req) -> None:
        """A waiting request got its row."""
        if (entry := self._of(req)) is not None:
            del entry.waiting[req]
            entry.num_running += 1

    def release(self, req: Req) -> None:
        """A request gave its row back; no step in flight holds it."""
        if (entry := self._of(req)) is not None:
            entry.num_running -= 1
            self._touch(entry)

    def forget(self, req: Req) -> None:
        """A request has ended; it may have been waiting."""
        self._numbers.pop(req, None)
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
        if entry.slot is None:
            return False
        return not self._contended or entry.waiting.get(req, 0) <= entry.last_number

    def slot_of(self, req: Req) -> int:
        """The slot of a running request's adapter; -1 if it has none."""
        entry = self._of(req)
        return -1 if entry is None or entry.slot is None else entry.slot

    @property
    def is_empty(self) -> bool:
        """Whether no request asks for an adapter."""
        return not self._numbers

    @property
    def is_loading(self) -> bool:
        """Whether workers are reading an adapter."""
        return any(entry.state is _State.LOADING for entry in self._entries.values())

    def give_slots(self) -> None:
        """Order what is lacking, and give free slots to adapters whose requests wait. Called before
        requests are chosen."""
        if not self._numbers and not self._prepared:
            return
        asked = [entry for entry in self._entries.values() if entry.waiting or entry.is_prepared]
        for entry in sorted((e for e in asked if e.state is _State.WANTED), key=lambda e: e.oldest):
            if not self._make_place():
                break
            entry.state = _State.LOADING
            self._orders.append(LoadAdapter(entry.ref))
        ready = (e for e in asked if e.state is _State.READY and e.slot is None)
        claims = [entry for entry in ready if entry.waiting]
        if claims and not self._contended:
            for entry in self._entries.values():
                entry.last_number = self._count
        for entry in sorted(claims, key=lambda e: e.oldest):
            slot = self._take_slot()
            if slot is None:
                break
            claims.remove(entry)
            entry.slot, entry.last_number = slot, self._count
            self._changes.append(AdapterSlot(slot, entry.ref.digest))
        self._contended = bool(claims)

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
        if not waiting <= self._numbers.keys():
            return f"adapter leak: {len(waiting)} requests wait, {len(self._numbers)} are known"
        return None

    def _of(self, req: Req) -> _Entry | None:
        ref = req.sequence.adapter
        return None if ref is None else self._entries.get(ref.digest)

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used = self._clock

    def _take_slot(self) -> int | None:
        """A free slot, if need be that of the adapter that was idle longest."""
        if self._free:
            return self._free.pop()
        over = [
            entry
            for entry in self._entries.values()
            if entry.slot is not None
            and not entry.num_running
            and all(number > entry.last_number for number in entry.waiting.values())
        ]
        if not over:
            return None
        victim = min(over, key=lambda entry: (bool(entry.waiting), entry.used))
        slot, victim.slot = victim.slot, None
        return slot

    def _make_place(self) -> bool:
        """Have room in the host's memory for one more adapter; False if all are in use."""
        held = [e for e in self._entries.values() if e.state in (_State.LOADING, _State.READY)]
        if len(held) < self._max_held:
            return True
        idle = [entry for entry in held if entry.state is _State.READY and entry.is_idle]
        if not idle:
            return False
        victim = min(idle, key=lambda entry: entry.used)
        if victim.slot is not None:
            self._free.append(victim.slot)
        del self._entries[victim.ref.digest]
        self._orders.append(DropAdapter(victim.ref.digest))
        self.evictions_total += 1
        return True
