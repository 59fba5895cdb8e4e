"""Which pages the requests under way are expected to leave, and until when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

from deploy.routing.replica_contents import ReplicaContents


class Booking(NamedTuple):
    """Pages that one request was booked to leave at one replica. `deadline`: seconds."""

    number: int
    contents: ReplicaContents
    pages: list[int]
    deadline: float


class Bookings:
    """Bookings by request, each with a deadline. All times are the caller's seconds.

    A booking is open until the request's first token. After it the booking is settled: the pages
    exist, and it waits for the replica's events, which confirm them. A settled booking waits
    `confirm_s`, an open booking lasts `max_age_s`.
    """

    def __init__(self, confirm_s: float, max_age_s: float) -> None:
        self._confirm_s = confirm_s
        self._max_age_s = max_age_s
        self._count = 0
        # Each waits for a constant time, so both are in order of their deadlines.
        self._open: OrderedDict[str, Booking] = OrderedDict()
        self._settled: deque[Booking] = deque()

    def open(self, key: str, contents: ReplicaContents, pages: list[int], now: float) -> int:
        """Book pages for a request that has no open booking; the booking's number."""
        self._count += 1
        self._open[key] = Booking(self._count, contents, pages, now + self._max_age_s)
        return self._count

    def settle(self, key: str, now: float) -> None:
        """The first token came. Keys without an open booking are ignored."""
        booking = self._open.pop(key, None)
        if booking is not None:
            self._settled.append(booking._replace(deadline=now + self._confirm_s))

    def cancel(self, key: str) -> Booking | None:
        """Remove and return an open booking; None if there is none."""
        return self._open.pop(key, None)

    def expired(self, now: float) -> Iterator[Booking]:
        """Remove and yield the bookings whose deadline has come."""
        settled, opened = self._settled, self._open
        while settled and settled[0].deadline <= now:
            yield settled.popleft()
        while opened and next(iter(opened.values())).deadline <= now:
            yield opened.popitem(last=False)[1]
