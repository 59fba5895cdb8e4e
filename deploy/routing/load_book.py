"""A router's own account of what it has sent where and what hasn't come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

SPEED_MEMORY: Final = 0.9
"""Weight of all earlier prefills beside the latest in the estimate of a replica's speed."""


@dataclass(slots=True)
class _Line:
    """Requests sent to one replica whose first token hasn't come, in order of dispatch.

    Fields:
        tokens: uncached prompt tokens by request.
        done_tokens, done_s: prefills seen lately and the time they took; their ratio is the
            replica's speed.
    """

    tokens: OrderedDict[str, int] = field(default_factory=OrderedDict)
    done_tokens: float = 0.0
    done_s: float = 0.0


class LoadBook:
    """Queued tokens and requests in flight by replica, booked at dispatch.

    Not when a replica reports: reports are late, and until one arrives every request would
    go to the same idle replica (p99 time to first token is several times higher then).

    Args:
        clock: seconds that only go forward.

    Fields, float64 [capacity] by slot, inf in free slots so that a minimum never falls on one:
        queued: uncached prompt tokens sent whose first token hasn't come.
        inflight: unfinished requests.
        last_used: int64, the tick of the latest dispatch, for breaking ties.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slot_of: dict[str, int] = {}
        self._lines: list[_Line] = []
        self._tick = 0
        self.queued: NDArray[np.float64] = np.empty(0)
        self.inflight: NDArray[np.float64] = np.empty(0)
        self.last_used: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        # The request at the head of each line: its tokens, since when, and how fast it goes.
        self._head: NDArray[np.float64] = np.empty(0)
        self._head_since: NDArray[np.float64] = np.empty(0)
        self._speed: NDArray[np.float64] = np.empty(0)

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._slot_of)

    def add(self, slot: int) -> None:
        """Open an account in a slot that was free."""
        while len(self._lines) <= slot:
            self._grow()
        self._lines[slot] = _Line()
        for column in (self.queued, self.inflight, self.last_used, self._head, self._speed):
            column[slot] = 0

    def remove(self, slot: int) -> None:
        """Close the account; notices about its requests mean nothing from now on."""
        self._slot_of = {key: at for key, at in self._slot_of.items() if at != slot}
        self._lines[slot] = _Line()
        self._head[slot] = 0.0
        self.queued[slot] = np.inf
        self.inflight[slot] = np.inf

    def dispatched(self, request_id: str, slot: int, uncached_tokens: int) -> None:
        """A request was sent. One that is known already was resubmitted, and counts once."""
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
        """It ended, in whatever way. Unknown requests are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._leave_line(request_id, slot, prefilled=False)
            self.inflight[slot] -= 1

    def remaining(self) -> NDArray[np.float64]:
        """queued, less what should be done by now of the prefill at the head of each line.

        A line's head was started when the one before it got its first token, and goes as
        fast as the replica's latest prefills. It's never taken to be more than done, so that
        a wrong guess, or a replica with another order, is off by one request at most.
        """
        done = self._clock() - self._head_since
        done *= self._speed
        np.minimum(self._head, done, out=done)
        return np.subtract(self.queued, done, out=done)

    def least(self, load: NDArray[np.float64], among: NDArray[np.intp] | None = None) -> int:
        """Slot with the least load [capacity]; ties: fewer queued tokens, then least recently used.

        Ties matter: always taking the lowest slot sends a quiet fleet's requests to one replica.

        Args:
            among: slots to choose from, at least one; None for all.
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
