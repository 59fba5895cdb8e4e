"""`EventNumbers`: the place of each event in its stream, by which a reader comes back.

The events of a stream are the same whenever its request is answered, in the order of each sequence.
A place is therefore a number of events; with several sequences, one number for each of them, joined
by full stops. Those of the first sequence include what opens and ends the stream.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from deploy.http.records.store import Record, tagged
from engine.errors import RequestError

LAST_EVENT_ID = "Last-Event-ID"
"""The header."""
_END = b"\n\n"
_PLACE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,2047}")


class Place(NamedTuple):
    """What a reader has had. `field`: where it said so."""

    counts: tuple[int, ...]
    field: str


def read_place(text: str, field: str) -> Place:
    """Raises `RequestError` if `text` is no place."""
    if not _PLACE.fullmatch(text):
        raise RequestError(f"{field} is no place in a stream: {text[:100]!a}.", field)
    return Place(tuple(map(int, text.split("."))), field)


def read_last(text: str, record: Record) -> Place:
    """The place behind an event whose id is `text`. Raises `RequestError` if it isn't one of the
    record's stream."""
    record_id, _, place = text.rpartition(":")
    if record_id not in (record.id, tagged(record)):
        raise RequestError(f"{LAST_EVENT_ID} is one of another stream.", LAST_EVENT_ID)
    return read_place(place, LAST_EVENT_ID)


class EventNumbers:
    """Numbers events, and leaves out those that the reader has had."""

    def __init__(
        self, record_id: str, num_sequences: int, place: Place | None = None, *, shown: bool
    ) -> None:
        """`shown`: events have an `id`, the record's and the place behind them. Raises
        `RequestError` if the place is one of another stream."""
        self._head = f"id: {record_id}:".encode()
        self._counts = [0] * num_sequences
        self._place = place
        self._had = [0] * num_sequences if place is None else list(place.counts)
        self.shown = shown
        if len(self._had) != num_sequences:
            assert place is not None
            raise RequestError(
                f"{place.field} must have {num_sequences} numbers, one for each sequence of the "
                "stream.",
                place.field,
            )

    def of_each(self, index: int, events: bytes) -> bytes:
        """The events of a sequence that the reader hasn't had, with their ids."""
        counts, had = self._counts, self._had[index]
        if len(counts) == 1 and counts[0] >= had and events.find(_END) == len(events) - 2:
            counts[0] += 1  # as nearly always
            return b"%b%d\n%b" % (self._head, counts[0], events) if self.shown else events
        found = []
        for event in events.split(_END)[:-1]:
            counts[index] += 1
            if counts[index] > had:
                found.append(self._with_id(event) + _END)
        return b"".join(found)

    def of_last(self, index: int, event: bytes, count: int) -> bytes:
        """As `of_each`, for one event that stands for `count`: it has what those before it have."""
        self._counts[index] += count
        return self._with_id(event) if self._counts[index] > self._had[index] else b""

    def check_end(self) -> None:
        """To be called behind the last event. Raises `RequestError` if the reader claims to have
        had more."""
        if any(had > count for had, count in zip(self._had, self._counts, strict=True)):
            assert self._place is not None
            field = self._place.field
            raise RequestError(f"{field} is behind the end of the stream.", field)

    def _with_id(self, event: bytes) -> bytes:
        if not self.shown:
            return event
        # What is still to come again of other sequences was had, too.
        place = ".".join(map(str, map(max, self._counts, self._had)))
        return self._head + place.encode() + b"\n" + event
