"""A router's own account of the load of each replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

SPEED_MEMORY: Final = 0.9
"""What earlier prefills weigh in a replica's speed after each new one."""


@dataclass(slots=True)
class _Line:
    """Requests at one replica that have no first token yet, in order of dispatch."""

    tokens: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Uncached prompt tokens by request."""
    done_tokens: float = 0.0
    """Tokens of recent prefills. Divided by `done_s` they give the replica's speed."""
    done_s: float = 0.0
    """Seconds that these prefills took."""


class LoadBook:
    """Queued tokens and requests in flight of each replica, counted at dispatch.

    Reports of the replicas would come too late. Until one arrives, every request would go to the
    same idle replica, and p99 time to first token would be several times as high.

    `clock` gives seconds that only go forward. Three arrays [capacity] are indexed by slot:
    `queued` (float64) has the uncached prompt tokens of requests without a first token, `inflight`
    (float64) the unfinished requests, and `last_used` (int64) the count of dispatches when the
    replica last got a request, for ties. `queued` and `inflight` are inf in free slots, so that a
    minimum never falls on one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slot_of: dict[str, int] = {}
        self._lines: list[_Line] = []
        self._tick = 0
        self.queued: NDArray[np.float64] = np.empty(0)
        self.inflight: NDArray[np.float64] = np.empty(0)
        self.last_used: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        # Of each line's first request: tokens, start in seconds, tokens/s.
        self._head: NDArray[np.float64] = np.empty(0)
        self._head_since: NDArray[np.float64] = np.empty(0)
        self._speed: NDArray[np.float64] = np.empty(0)

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._slot_of)

    def add(self, slot: int) -> None:
        """A replica has this slot now. The slot was free."""
        while len(self._lines) <= slot:
            self._grow()
        self._lines[slot] = _Line()
        for column in (self.queued, self.inflight, self.last_used, self._head, self._speed):
            column[slot] = 0

    def remove(self, slot: int) -> None:
        """The slot is free again. From now on notices about its requests are ignored."""
        self._slot_of = {key: at for key, at in self._slot_of.items() if at != slot}
        self._lines[slot] = _Line()
        self._head[slot] = 0.0
        self.queued[slot] = np.inf
        self.inflight[slot] = np.inf

    def dispatched(self, request_id: str, slot: int, uncached_tokens: int) -> None:
        """A request was sent. If it is known already, it only counts here from now on."""
        self.finished(request_id)
        self._tick += 1
        self._slot_of[request_id] = slot
        line = self._lines[slot]
        line.tokens[request_id] = uncached_tokens
        if len(line.tokens) == 1:
            self._next_head(slot)
        self.queued[slot] += uncached_tokens
        self.inflight[slot] += 1
        self.last_used[slot] = self._tick

    def first_token(self, request_id: str) -> None:
        """Its prefill is done. Unknown requests (of a removed replica) are ignored."""
        slot = self._slot_of.get(request_id)
        if slot is not None:
            self._leave_line(request_id, slot, prefilled=True)

    def finished(self, request_id: str) -> None:
        """It ended, well or not. Unknown requests are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._leave_line(request_id, slot, prefilled=False)
            self.inflight[slot] -= 1

    def remaining(self) -> NDArray[np.float64]:
        """`queued`, less the part of each line's first prefill that should be done by now.

        This prefill began when the one before it got its first token, and is taken to be as fast
        as the replica's recent prefills. At most all of it counts as done. So if the guess is
        wrong, or the replica works in another order, the error is one request at most.
        """
        done = self._clock() - self._head_since
        done *= self._speed
        np.minimum(self._head, done, out=done)
        return np.subtract(self.queued, done, out=done)

    def least(self, load: NDArray[np.float64], among: NDArray[np.intp] | None = None) -> int:
        """The slot with the least load.

        Ties go to the slot with fewer queued tokens, then to the one used longest ago. If the
        lowest slot won them, a quiet fleet's requests would all go to one replica. `load` is
        [capacity]. `among` are the slots to choose from, at least one; None means all.
        """
        if among is not None:
            load = load[among]
        tied = (load == load.item(load.argmin())).nonzero()[0]
        if among is not None:
            tied = among[tied]
        if len(tied) > 1:
            queued = self.queued[tied]
            tied = tied[queued == queued.item(queued.argmin())]
        at = self.last_used[tied].argmin() if len(tied) > 1 else 0
        slot: int = tied.item(at)
        return slot

    def _leave_line(self, request_id: str, slot: int, *, prefilled: bool) -> None:
        line = self._lines[slot]
        tokens = line.tokens.get(request_id)
        if tokens is None:
            return
        is_head = next(iter(line.tokens)) == request_id
        del line.tokens[request_id]
        self.queued[slot] -= tokens
        if is_head:
            if prefilled:
                seconds = self._clock() - self._head_since[slot]
                line.done_tokens = SPEED_MEMORY * line.done_tokens + tokens
                line.done_s = SPEED_MEMORY * line.done_s + seconds
                if line.done_s > 0:
                    self._speed[slot] = line.done_tokens / line.done_s
            self._next_head(slot)

    def _next_head(self, slot: int) -> None:
        line = self._lines[slot].tokens
        self._head[slot] = next(iter(line.values()), 0)
        self._head_since[slot] = self._clock()

    def _grow(self) -> None:
        """One more slot, free."""
        self._lines.append(_Line())
        self.queued = np.append(self.queued, np.inf)
        self.inflight = np.append(self.inflight, np.inf)
        self.last_used = np.append(self.last_used, 0)
        self._head = np.append(self._head, 0.0)
        self._head_since = np.append(self._head_since, 0.0)
        self._speed = np.append(self._speed, 0.0)
