"""`KeyShares`: the waiting requests by API key, and whose turn it is.

Keys take turns by deficit round robin (Shreedhar and Varghese, 1995) with tokens as the currency. A
key whose turn comes gets `QUANTUM` tokens of credit, and its requests are admitted while it has
credit. Computed prompt tokens and sampled tokens are charged, so a key whose requests generate much
waits for more turns. A key that has nothing waiting has neither credit nor debt: it can't save up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from engine.protocol.messages import KeyLimits
from engine.scheduler.req import Req
from engine.scheduler.schedule_policy import SchedulePolicy

QUANTUM = 512
"""Tokens of credit that a turn brings: about a prompt, so that turns change often."""
_NAMELESS = KeyLimits("")


@dataclass(slots=True, eq=False)
class KeyShare:
    """One key's requests."""

    limits: KeyLimits
    waiting: list[Req] = field(default_factory=list)
    num_running: int = 0
    """Requests that hold a row."""
    waiting_tokens: int = 0
    """Prompt tokens of those that wait and haven't begun."""
    credit: float = 0.0

    @property
    def may_run(self) -> bool:
        """Whether one of its waiting requests may be admitted."""
        limit = self.limits.max_running
        return bool(self.waiting) and (limit is None or self.num_running < limit)


class KeyShares:
    """All keys that have requests; without keys there is one share."""

    def __init__(self) -> None:
        self._by_name: dict[str, KeyShare] = {}
        """In the order of their turns: the first one's is now."""

    @property
    def waiting(self) -> list[Req]:
        """All waiting requests."""
        if len(self._by_name) == 1:
            return next(iter(self._by_name.values())).waiting
        return [req for share in self._by_name.values() for req in share.waiting]

    @property
    def num_waiting(self) -> int:
        """Their number."""
        return sum(len(share.waiting) for share in self._by_name.values())

    @property
    def is_contended(self) -> bool:
        """Whether there is more than one key."""
        return len(self._by_name) > 1

    def get(self, limits: KeyLimits | None) -> KeyShare | None:
        """The share of a key, if it has requests."""
        return self._by_name.get((limits or _NAMELESS).name)

    def num_waiting_keys(self, besides: KeyLimits | None) -> int:
        """Keys that have requests waiting, without one."""
        name = (besides or _NAMELESS).name
        return sum(bool(s.waiting) for s in self._by_name.values() if s.limits.name != name)

    def num_others(self, req: Req) -> int:
        """Keys besides that of `req` that may run a waiting request."""
        name = req.key_name
        return sum(s.may_run for s in self._by_name.values() if s.limits.name != name)

    def add(self, req: Req) -> None:
        """A request begins to wait. What it says of its key holds from now on."""
        name = req.key_name
        share = self._by_name.get(name)
        if share is None:
            share = self._by_name[name] = KeyShare(req.key or _NAMELESS)
        elif req.key is not None:
            share.limits = req.key
        self.wait(req)

    def wait(self, req: Req) -> None:
        """A request waits (again)."""
        share = self._by_name[req.key_name]
        if not share.waiting and self.is_contended:
            self._to_the_end(share)
        share.waiting.append(req)
        share.waiting_tokens += _queued_tokens(req)

    def admit(self, req: Req) -> None:
        """A waiting request gets a row. Call `forget_waiting` before the next step."""
        self._by_name[req.key_name].num_running += 1

    def forget_waiting(self, reqs: Collection[Req]) -> None:
        """These don't wait any more: they were admitted, or have ended."""
        gone = {id(req) for req in reqs}
        for name in {req.key_name for req in reqs}:
            share = self._by_name[name]
            share.waiting = [req for req in share.waiting if id(req) not in gone]
            share.waiting_tokens = sum(_queued_tokens(req) for req in share.waiting)
            if not share.waiting:
                share.credit = 0.0
            self._forget(share)

    def release(self, req: Req) -> None:
        """A request gives its row back."""
        share = self._by_name[req.key_name]
        share.num_running -= 1
        self._forget(share)

    def charge(self, req: Req, tokens: int) -> None:
        """Tokens were computed for a request."""
        share = self._by_name[req.key_name]
        if share.waiting:
            share.credit -= tokens

    def charge_each(self, reqs: Sequence[Req]) -> None:
        """A token was sampled for each of these."""
        for req in reqs:
            share = self._by_name.get(req.key_name)
            if share is not None and share.waiting:
                share.credit -= 1

    def may_run(self) -> bool:
        """Whether a waiting request may be admitted, as far as keys are concerned."""
        return any(share.may_run for share in self._by_name.values())

    def offers(
        self, policy: SchedulePolicy, match: Callable[[Req], None], besides: Req | None = None
    ) -> Iterator[Req]:
        """Waiting requests in the order in which to admit them, each matched; those of the key of
        `besides` are left out.

        `policy` orders the requests of a key. Before it asks for the next one, the caller has
        admitted and charged the last one, or it doesn't want that now.
        """
        left_out = None if besides is None else besides.key_name
        queues: dict[str, Iterator[Req]] = {}
        over: set[str] = set()
        while True:
            ready = [
                share
                for name, share in self._by_name.items()
                if share.may_run and name != left_out and name not in over
            ]
            if not ready:
                return
            name = self._next(ready).limits.name
            if name not in queues:
                queues[name] = _in_order(self._by_name[name].waiting, policy, match)
            req = next(queues[name], None)
            if req is None:
                over.add(name)
            else:
                yield req

    def heads(self, policy: SchedulePolicy, match: Callable[[Req], None]) -> Iterator[Req]:
        """The next request of each key that may run one, matched."""
        for share in list(self._by_name.values()):
            if share.may_run:
                yield next(_in_order(share.waiting, policy, match))

    def check(self, reqs: Collection[Req]) -> str | None:
        """What is wrong with the counts, of all requests `reqs`; None if nothing is."""
        for name, share in self._by_name.items():
            own = [req for req in reqs if req.key_name == name]
            running = sum(req.req_pool_idx != 0 for req in own)
            tokens = sum(_queued_tokens(req) for req in share.waiting)
            if not own or running != share.num_running or tokens != share.waiting_tokens:
                return (
                    f"key {name!r} counts {share.num_running} running, {share.waiting_tokens} "
                    f"waiting tokens; there are {running}, {tokens} of {len(own)} requests"
                )
        return None

    def _next(self, ready: list[KeyShare]) -> KeyShare:
        """The share whose turn it is, of those that may run, which are in the order of turns."""
        if len(ready) == 1:
            return ready[0]
        if ready[0].credit > 0:
            return ready[0]
        if all(share.credit <= 0 for share in ready):
            # So many whole rounds as nobody gains credit in.
            rounds = min(math.floor(-share.credit / QUANTUM) for share in ready)
            for share in ready:
                share.credit += rounds * QUANTUM
        for share in ready:
            if share.credit > 0:
                return share
            self._to_the_end(share)
            share.credit += QUANTUM
        # A round has gone by: each share is where it was, and some have credit now.
        return next(share for share in ready if share.credit > 0)

    def _to_the_end(self, share: KeyShare) -> None:
        """Its next turn is after those of all others."""
        name = share.limits.name
        self._by_name[name] = self._by_name.pop(name)

    def _forget(self, share: KeyShare) -> None:
        if not share.waiting and share.num_running == 0:
            del self._by_name[share.limits.name]


def _queued_tokens(req: Req) -> int:
    """What a waiting request counts for in `max_queued_tokens`: nothing once it has begun."""
    return 0 if req.output_ids else req.prompt_len


def _in_order(
    queue: list[Req], policy: SchedulePolicy, match: Callable[[Req], None]
) -> Iterator[Req]:
    matched = policy.sort(queue, match)
    for req in queue:
        if not matched:
            req.begin_round()
            match(req)
        yield req
