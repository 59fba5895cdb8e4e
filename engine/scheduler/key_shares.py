"""`KeyShares`: the waiting requests by API key, and whose turn it is.

Keys take turns by deficit round robin (Shreedhar and Varghese, 1995) with tokens as the currency.
The key with the most credit has the turn, and pays for the prompt tokens that the step computes for
it. Sampled tokens are paid for too, while a request waits that could be admitted. So what a key
used when nobody else wanted it is no debt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.protocol.sequence import KeyLimits
from engine.scheduler.req import Req

QUANTUM = 512
"""Tokens of credit that a round brings: about a prompt, so that turns change often."""
MAX_DECODE_DEBT = 16 * QUANTUM
"""Sampled tokens lead to no deeper debt: a key that had most rows for long isn't locked out."""
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
    credit: int = QUANTUM

    @property
    def may_run(self) -> bool:
        """Whether one of its waiting requests may be admitted."""
        limit = self.limits.max_running
        return bool(self.waiting) and (limit is None or self.num_running < limit)

    @property
    def num_admissible(self) -> int:
        """How many of its waiting requests may be admitted."""
        limit, count = self.limits.max_running, len(self.waiting)
        return count if limit is None else min(count, max(limit - self.num_running, 0))


class KeyShares:
    """All keys that have requests; without keys there is one share.

    If no key with something to admit has credit, every key gets `QUANTUM` tokens, until one of them
    has. No key has more than `QUANTUM` tokens of credit, so none saves up. A key that comes (back)
    finds the others with credit, not with debts that it would profit from. Debts stay while a key
    has requests that run: to have only one request wait at a time is no way to more tokens.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, KeyShare] = {}

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

    def get(self, limits: KeyLimits | None) -> KeyShare | None:
        """The share of a key, if it has requests."""
        return self._by_name.get((limits or _NAMELESS).name)

    def of(self, req: Req) -> KeyShare:
        """The share of a request that was added and hasn't left."""
        return self._by_name[req.key_name]

    def num_waiting_keys(self, besides: KeyLimits | None) -> int:
        """Keys that have requests waiting, without one."""
        name = (besides or _NAMELESS).name
        return sum(bool(s.waiting) for s in self._by_name.values() if s.limits.name != name)

    def add(self, req: Req) -> None:
        """A request begins to wait. What it says of its key holds from now on."""
        name = req.key_name
        share = self._by_name.get(name)
        if share is None:
            share = self._by_name[name] = KeyShare(req.sequence.key or _NAMELESS)
        elif req.sequence.key is not None:
            share.limits = req.sequence.key
        self.wait(req)

    def wait(self, req: Req) -> None:
        """A request waits (again)."""
        share = self.of(req)
        if not share.waiting and len(self._by_name) > 1:
            others = [s.credit for s in self._by_name.values() if s.waiting]
            if others:
                self._pay(max(others))
        share.waiting.append(req)
        share.waiting_tokens += _queued_tokens(req)

    def admit(self, req: Req) -> None:
        """A waiting request gets a row. Call `forget_waiting` before the next step."""
        self.of(req).num_running += 1

    def forget_waiting(self, reqs: Collection[Req]) -> None:
        """These don't wait any more: they were admitted, or have ended."""
        gone = {id(req) for req in reqs}
        for name in {req.key_name for req in reqs}:
            share = self._by_name[name]
            share.waiting = [req for req in share.waiting if id(req) not in gone]
            share.waiting_tokens = sum(_queued_tokens(req) for req in share.waiting)
            self._forget(share)

    def release(self, req: Req) -> None:
        """A request gives its row back."""
        share = self.of(req)
        share.num_running -= 1
        self._forget(share)

    def ready(self) -> list[KeyShare]:
        """Those that may run a waiting request."""
        return [share for share in self._by_name.values() if share.may_run]

    def may_run(self) -> bool:
        """Whether a waiting request may be admitted, as far as keys are concerned."""
        return any(share.may_run for share in self._by_name.values())

    def next(self, ready: Sequence[KeyShare]) -> KeyShare:
        """Whose turn it is, of at least one share. Of equal ones it is the one that runs least."""
        best = max(ready, key=lambda share: (share.credit, -share.num_running))
        self._pay(best.credit)
        return best

    def charge(self, share: KeyShare, tokens: int) -> None:
        """Prompt tokens are computed for a key. A key without others needn't pay."""
        if len(self._by_name) > 1:
            share.credit -= tokens

    def charge_rows(self, rows: Mapping[str, int]) -> None:
        """A step samples a token for each of so many rows by key name."""
        if len(self._by_name) > 1 and self.may_run():
            for name, count in rows.items():
                share = self._by_name[name]
                share.credit = max(share.credit - count, min(share.credit, -MAX_DECODE_DEBT))

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

    def clear(self) -> None:
        """Forget all keys; only when there is no request."""
        self._by_name.clear()

    def _pay(self, most: int) -> None:
        """So many rounds that a share with `most` credit has some: none if it has."""
        if most > 0 or len(self._by_name) == 1:
            return
        rounds = 1 + -most // QUANTUM
        for share in self._by_name.values():
            share.credit = min(QUANTUM, share.credit + rounds * QUANTUM)

    def _forget(self, share: KeyShare) -> None:
        if not share.waiting and share.num_running == 0:
            del self._by_name[share.limits.name]


def _queued_tokens(req: Req) -> int:
    """What a waiting request counts for in `max_queued_tokens`: nothing once it has begun."""
    return 0 if req.output_ids else req.prompt_len
