"""The order in which waiting requests are offered to the `PrefillAdder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.scheduler.req import Req

LPM_QUEUE_LIMIT = 128
"""Matching costs tens of µs per waiting request. Longer queues are first come, first served
(SGLang's figure)."""


class SchedulePolicy(ABC):
    """Sorts the waiting queue in place. `match` fills a request's cached prefix."""

    @abstractmethod
    def sort(self, queue: list[Req], match: Callable[[Req], None]) -> bool:
        """Sort `queue`; True if every request in it was matched on the way."""


class FCFS(SchedulePolicy):
    """First come, first served; retracted requests keep their arrival time."""

    def sort(self, queue: list[Req], match: Callable[[Req], None]) -> bool:
        queue.sort(key=_arrival)
        return False


class LPM(SchedulePolicy):
    """Longest cached prefix first (SGLang, RadixAttention §3.2): hits before they are evicted."""

    def sort(self, queue: list[Req], match: Callable[[Req], None]) -> bool:
        if len(queue) > LPM_QUEUE_LIMIT:
            queue.sort(key=_arrival)
            return False
        for req in queue:
            req.begin_round()
            match(req)
        queue.sort(key=lambda r: (-r.cached_len, r.arrival, r.rid))
        return True


class Priority(SchedulePolicy):
    """Lowest `priority` number first (vLLM's convention), then first come."""

    def sort(self, queue: list[Req], match: Callable[[Req], None]) -> bool:
        queue.sort(key=lambda r: (r.sequence.priority, r.arrival, r.rid))
        return False


def _arrival(req: Req) -> tuple[float, int]:
    return (req.arrival, req.rid)
