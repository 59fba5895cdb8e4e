"""Which replica holds which page of which prompt."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.routing.bookings import Booking, Bookings
from deploy.routing.prefix_match import PrefixMatch
from deploy.routing.replica_contents import ReplicaContents
from deploy.routing.replica_slots import ReplicaSlots
from engine.protocol.messages import AllCleared, BlockRemoved, BlockStored, KVEvent

_HASHES: Final = 2**64
"""Page hashes are below this, and evenly spread."""

_LEAST_LIMIT: Final = 2**32


class ApplyResult(enum.Enum):
    """What became of a replica's events."""

    APPLIED = "applied"
    STALE = "stale"
    """Known already, or from an epoch that is over: nothing changed."""
    GAP = "gap"
    """Numbers are missing: ask the replica for a snapshot now."""
    WAITING = "waiting"
    """Kept until the snapshot that a gap called for arrives."""
    UNKNOWN = "unknown"
    """No such replica: it has gone, or hasn't been added yet. Nothing changed."""


class PrefixIndex:
    """For each page hash, the set of replicas that hold the page, as bits of a Python integer.

    It learns from two sources. Each replica's cache sends numbered events
    (RadixCache.drain_events), which arrive late. And each request that is sent to a replica is
    booked: it will leave its pages there, so they count at once. (With bookings, events that are
    2 s late cost a fraction of a point of hit rate. Without, they cost 1 to 3 points.) An event
    confirms a booked page. A page that is not confirmed in time is removed.

    Caches are trees, so whoever holds a page also holds the pages before it. A match therefore
    finds the longest prefix by bisection, and looks up as few pages for 1,024 replicas as for 8.
    (There is one exception: pages before a booked one can be missing, because they were evicted,
    or were booked a second time and cancelled. The request under way computes them again.)

    An entry for one page and one replica takes about 0.2 KB. When there are more than max_pages
    of them, the index keeps only every second page, then every fourth, and so on. It keeps the
    pages with the lowest hashes, so that stores, evictions and matches agree on which. Matches
    become coarser, never wrong. For pages of one token, start with sample_every=16.

    Not thread safe: one event loop owns it.

    `slots` gives replicas their bits; it is shared with the account of their loads. `max_pages` is
    the most (page, replica) pairs to keep. `sample_every`, a power of two, is 1 / the share of
    pages to keep at the start. `max_waiting` is the most events to keep for a replica until its
    snapshot arrives. The pages of a request wait `confirm_s` for their events after its first
    token. The booking of a request without a first token lasts `max_age_s`. Raises `ValueError` if
    `max_pages` or `sample_every` is out of range.
    """

    def __init__(
        self,
        slots: ReplicaSlots,
        *,
        max_pages: int = 4_000_000,
        sample_every: int = 1,
        max_waiting: int = 10_000,
        confirm_s: float = 10.0,
        max_age_s: float = 600.0,
    ) -> None:
        if sample_every < 1 or sample_every & (sample_every - 1):
            raise ValueError(f"sample_every must be a power of two, not {sample_every}")
        if max_pages < 1:
            raise ValueError(f"max_pages must be at least 1, not {max_pages}")
        self._slots = slots
        self._max_pages = max_pages
        self._max_waiting = max_waiting
        self._limit = _HASHES // sample_every
        self._masks: dict[int, int] = {}
        self._num_pages = 0
        self._contents: dict[str, ReplicaContents] = {}
        self._bookings = Bookings(confirm_s, max_age_s)

    @property
    def num_pages(self) -> int:
        """(Page, replica) pairs in the index."""
        return self._num_pages

    @property
    def sample_every(self) -> int:
        """1 / the share of pages that the index keeps now."""
        return _HASHES // self._limit

    @property
    def replicas_waiting(self) -> list[str]:
        """Replicas with a gap, whose snapshots are due."""
        return [name for name, c in self._contents.items() if c.waiting is not None]

    def seq_of(self, replica: str) -> int:
        """Number of the last event applied. Raises KeyError if the replica is unknown."""
        return self._contents[replica].seq

    def pages_of(self, replica: str) -> frozenset[int]:
        """Pages that the replica is believed to hold, booked ones included."""
        contents = self._contents[replica]
        return frozenset(contents.held) | frozenset(contents.booked)

    def add(self, replica: str) -> None:
        """Start to follow a replica, which is taken to be empty."""
        if replica not in self._contents:
            self._contents[replica] = ReplicaContents(1 << self._slots.slot(replica))

    def forget(self, replica: str) -> None:
        """Drop a replica that has gone, and its bookings. Its slot is free afterwards."""
        contents = self._contents.pop(replica, None)
        if contents is not None:
            self._empty(contents)

    def apply(self, replica: str, epoch: int, events: Sequence[KVEvent]) -> ApplyResult:
        """Take in a replica's events, which are in order.

        `epoch` grows with every restart of the replica's scheduler. A new one starts with an empty
        cache and event 1.
        """
        contents = self._in_epoch(replica, epoch)
        if isinstance(contents, ApplyResult):
            return contents
        if contents.waiting is not None:
            contents.waiting.extend(events)
            return ApplyResult.WAITING
        fresh = [event for event in events if event.seq > contents.seq]
        if not fresh:
            return ApplyResult.STALE
        for number, event in enumerate(fresh):
            if event.seq != contents.seq + 1:
                contents.waiting = deque(fresh[number:], maxlen=self._max_waiting)
                break
            self._apply(contents, event)
        self._bound_memory()
        return ApplyResult.APPLIED if contents.waiting is None else ApplyResult.GAP

    def check_seq(self, replica: str, epoch: int, seq: int) -> ApplyResult:
        """Compare with the number of the last event that the replica says it has sent.

        If the newest events are lost, only this shows it before the next event arrives.
        """
        contents = self._in_epoch(replica, epoch)
        if isinstance(contents, ApplyResult):
            return contents
        if contents.waiting is not None:
            return ApplyResult.WAITING
        if seq > contents.seq:
            contents.waiting = deque(maxlen=self._max_waiting)
            return ApplyResult.GAP
        return ApplyResult.APPLIED

    def load_snapshot(
        self, replica: str, epoch: int, seq: int, hashes: Iterable[int]
    ) -> ApplyResult:
        """Replace what is known of a replica by all that it held after event seq.

        Events that waited for the snapshot are applied on top of it. GAP means that some of
        those are missing too: ask for another snapshot.
        """
        contents = self._in_epoch(replica, epoch)
        if isinstance(contents, ApplyResult):
            return contents
        if seq < contents.seq:
            return ApplyResult.STALE
        waiting, contents.waiting = contents.waiting, None
        self._clear(contents.held, contents)
        self._store(contents, hashes)
        contents.seq = seq
        self._bound_memory()
        if not waiting:
            return ApplyResult.APPLIED
        result = self.apply(replica, epoch, list(waiting))
        return ApplyResult.APPLIED if result is ApplyResult.STALE else result

    def match(self, page_hashes: NDArray[np.uint64]) -> PrefixMatch:
        """Who holds how much of a prompt; page_hashes [num_pages]."""
        pages, ends = self._sampled(page_hashes)
        masks = self._masks
        page_at = pages.item
        known, unknown = 0, len(pages)
        while known < unknown:
            middle = (known + unknown) // 2
            if page_at(middle) in masks:
                known = middle + 1
            else:
                unknown = middle
        return PrefixMatch(ends[:known], pages, masks)

    def book(self, key: str, replica: str, page_hashes: NDArray[np.uint64], now: float) -> int:
        """Count a prompt's pages as held by the replica that the request is sent to.

        An open booking of the same key is cancelled: the request is sent a second time. Returns the
        number of leading pages of the prompt that the replica held before. Raises `KeyError` if the
        replica is unknown.
        """
        self.cancel(key)
        self._expire(now)
        contents = self._contents[replica]
        held, booked = contents.held, contents.booked
        sampled, ends = self._sampled(page_hashes)
        pages: list[int] = sampled.tolist()
        matched = 0
        for page in pages:
            if page not in held and page not in booked:
                break
            matched += 1
        pages = [page for page in pages if page not in held]
        number = self._bookings.open(key, contents, pages, now)
        before = len(booked)
        booked.update(dict.fromkeys(pages, number))
        self._num_pages += len(booked) - before
        masks, bit = self._masks, contents.bit
        for page in pages:
            masks[page] = masks.get(page, 0) | bit
        self._bound_memory()
        return ends[matched - 1] if matched else 0

    def settle(self, key: str, now: float) -> None:
        """The request's first token came, so its pages exist. Unknown keys are ignored."""
        self._bookings.settle(key, now)
        self._expire(now)

    def cancel(self, key: str) -> None:
        """The request ended before its first token. Unknown or settled keys are ignored."""
        booking = self._bookings.cancel(key)
        if booking is not None:
            self._drop(booking)

    def _sampled(self, page_hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Sequence[int]]:
        """The pages that the index keeps, and for each the number of pages up to it and with it."""
        limit = self._limit
        if limit == _HASHES:
            return page_hashes, range(1, len(page_hashes) + 1)
        kept = (page_hashes < limit).nonzero()[0]
        return page_hashes[kept], (kept + 1).tolist()

    def _in_epoch(self, replica: str, epoch: int) -> ReplicaContents | ApplyResult:
        """What the replica holds in this epoch, empty if the epoch is new; UNKNOWN or STALE."""
        contents = self._contents.get(replica)
        if contents is None:
            return ApplyResult.UNKNOWN
        if contents.epoch is not None and epoch < contents.epoch:
            return ApplyResult.STALE
        if contents.epoch != epoch:
            if contents.epoch is not None:
                self._empty(contents)
            contents.epoch = epoch
            contents.seq = 0
            contents.waiting = None
        return contents

    def _apply(self, contents: ReplicaContents, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self._store(contents, event.block_hashes)
            case BlockRemoved():
                self._remove(contents, event.block_hashes)
            case AllCleared():
                self._clear(contents.held, contents)
        contents.seq = event.seq

    def _store(self, contents: ReplicaContents, pages: Iterable[int]) -> None:
        masks, held, booked, bit = self._masks, contents.held, contents.booked, contents.bit
        limit = self._limit
        for page in pages:
            if page >= limit or page in held:
                continue
            held.add(page)
            if booked.pop(page, None) is None:
                self._num_pages += 1
                masks[page] = masks.get(page, 0) | bit

    def _remove(self, contents: ReplicaContents, pages: Iterable[int]) -> None:
        held = contents.held
        gone = [page for page in pages if page in held]
        held.difference_update(gone)
        self._unset(contents, gone)

    def _empty(self, contents: ReplicaContents) -> None:
        self._clear(contents.held, contents)
        self._clear(contents.booked, contents)

    def _clear(self, pages: set[int] | dict[int, int], contents: ReplicaContents) -> None:
        """Empty contents.held or contents.booked."""
        self._unset(contents, pages)
        pages.clear()

    def _drop(self, booking: Booking) -> None:
        """Remove those pages of a booking that were neither confirmed nor booked again since."""
        booked = booking.contents.booked
        gone = [page for page in booking.pages if booked.get(page) == booking.number]
        for page in gone:
            del booked[page]
        self._unset(booking.contents, gone)

    def _unset(self, contents: ReplicaContents, pages: Iterable[int]) -> None:
        masks, bit = self._masks, contents.bit
        count = 0
        for page in pages:
            count += 1
            left = masks[page] & ~bit
            if left:
                masks[page] = left
            else:
                del masks[page]
        self._num_pages -= count

    def _expire(self, now: float) -> None:
        for booking in self._bookings.expired(now):
            self._drop(booking)

    def _bound_memory(self) -> None:
        while self._num_pages > self._max_pages and self._limit > _LEAST_LIMIT:
            self._limit //= 2
            limit = self._limit
            for contents in self._contents.values():
                contents.held = {page for page in contents.held if page < limit}
                contents.booked = {p: number for p, number in contents.booked.items() if p < limit}
            self._masks = {page: mask for page, mask in self._masks.items() if page < limit}
            self._num_pages = sum(len(c.held) + len(c.booked) for c in self._contents.values())
