"""Which replica holds which page of which prompt."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class PrefixMatch:
    """How much of a prompt replicas hold.

    Fields:
        ends: numbers of pages, growing: the first ends[i] are held by holders(i), and the first
            ends[-1] is the most that anyone holds.
    """

    __slots__ = ("_masks", "_pages", "ends")

    def __init__(
        self, ends: Sequence[int], pages: NDArray[np.uint64], masks: Mapping[int, int]
    ) -> None:
        self.ends = ends
        self._pages = pages
        self._masks = masks

    def holders(self, level: int) -> int:
        """Bits by slot; each set contains that of the next level."""
        return self._masks.get(self._pages.item(level), 0)


class _Contents:
    """What one replica holds.

    Fields:
        bit: 1 << slot.
        epoch: the life of its scheduler that the numbers belong to; None before the first
            events or snapshot.
        seq: number of the last event applied.
        held: pages by its events.
        own: pages that requests sent there will leave, by the latest booking's number. A
            page is in held or in own, never in both.
        waiting: events that came after a gap, in order; None when there's no gap.
    """

    __slots__ = ("bit", "epoch", "held", "own", "seq", "waiting")

    def __init__(self, slot: int) -> None:
        self.bit = 1 << slot
        self.epoch: int | None = None
        self.seq = 0
        self.held: set[int] = set()
        self.own: dict[int, int] = {}
        self.waiting: deque[KVEvent] | None = None


class _Booking(NamedTuple):
    """Pages that a request was booked to leave at a replica; deadline in the caller's seconds."""

    number: int
    contents: _Contents
    pages: list[int]
    deadline: float


class PrefixIndex:
    """Page hashes to the set of replicas that hold the page, as bits of a Python integer.

    Fed by each replica's numbered cache events (RadixCache.drain_events), which arrive late,
    and by bookings: a request that is sent to a replica will leave its pages there, so they
    count at once (events that are 2 s late then cost a fraction of a point of hit rate; without
    bookings 1 to 3 points). An event confirms a booked page; what isn't confirmed in time
    goes again.

    A page stands for all before it, since caches are trees: a match looks some pages up by
    bisection, for 8 as for 1,024 replicas. (Pages before it may be missing only where they were
    evicted under a booked prompt, or booked once more and cancelled; the request that is on its
    way with that prompt brings them back.)

    Memory is about 0.2 KB for each page and replica. When the number of (page, replica) pairs
    passes max_pages, the index keeps every second page (those with the lower hashes, so that
    stores, evictions and matches agree on which), then every fourth, and so on: matches get
    coarser, never wrong. A fleet with pages of one token starts with sample_every=16.

    Not thread safe: one event loop owns it.

    Args:
        slots: gives replicas their bits; shared with whoever keeps their loads.
        max_pages: (page, replica) pairs kept at most.
        sample_every: a power of two; one page of so many is kept, by its hash.
        max_waiting: events kept for each replica while its snapshot is on its way.
        confirm_s: how long after its first token a request's pages wait for their events.
        max_age_s: bookings of requests without a first token are given up after this.
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
        self._confirm_s = confirm_s
        self._max_age_s = max_age_s
        self._limit = _HASHES // sample_every
        self._masks: dict[int, int] = {}
        self._num_pages = 0
        self._contents: dict[str, _Contents] = {}
        self._booked = 0
        # Both in order of their deadlines: a constant after booking, and after first token.
        self._open: OrderedDict[str, _Booking] = OrderedDict()
        self._confirming: deque[_Booking] = deque()

    @property
    def num_pages(self) -> int:
        """(Page, replica) pairs in the index."""
        return self._num_pages

    @property
    def sample_every(self) -> int:
        return _HASHES // self._limit

    @property
    def replicas_waiting(self) -> list[str]:
        """Replicas with a gap: their snapshots are due (ask again if one got lost)."""
        return [name for name, c in self._contents.items() if c.waiting is not None]

    def seq_of(self, replica: str) -> int:
        """Number of the last event that was applied. Raises KeyError if it's unknown."""
        return self._contents[replica].seq

    def pages_of(self, replica: str) -> frozenset[int]:
        """Pages that the replica is believed to hold, booked ones included."""
        contents = self._contents[replica]
        return frozenset(contents.held) | frozenset(contents.own)

    def add(self, replica: str) -> None:
        """Start to follow a replica, which is taken to be empty."""
        if replica not in self._contents:
            self._contents[replica] = _Contents(self._slots.slot(replica))

    def forget(self, replica: str) -> None:
        """Drop a replica that has gone, and its bookings. Its slot may be given on then."""
        contents = self._contents.pop(replica, None)
        if contents is not None:
            self._clear(contents.held, contents)
            self._clear(contents.own, contents)

    def apply(self, replica: str, epoch: int, events: Sequence[KVEvent]) -> ApplyResult:
        """Take in a replica's events.

        Args:
            replica: who sent them.
            epoch: grows with every restart of the replica's scheduler; a new one starts with
                an empty cache and event 1.
            events: in order.
        """
        contents = self._contents.get(replica)
        if contents is None:
            return ApplyResult.UNKNOWN
        if not self._enter_epoch(contents, epoch):
            return ApplyResult.STALE
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
        """Compare with the number of the last event that a replica says it has sent.

        Without such a sign of life the loss of the newest events shows only when the next
        one arrives.
        """
        contents = self._contents.get(replica)
        if contents is None:
            return ApplyResult.UNKNOWN
        if not self._enter_epoch(contents, epoch):
            return ApplyResult.STALE
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

        Events that came meanwhile are applied on top. GAP means that some of those are
        missing too: ask for another snapshot.
        """
        contents = self._contents.get(replica)
        if contents is None:
            return ApplyResult.UNKNOWN
        if not self._enter_epoch(contents, epoch) or seq < contents.seq:
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
        """Count a prompt's pages as held by the replica that it's being sent to.

        A booking of the same key that is still open (the request is being resubmitted) is
        cancelled.

        Returns:
            Leading pages of the prompt that the replica held before.

        Raises:
            KeyError: the replica is unknown.
        """
        self.cancel(key)
        self._expire(now)
        contents = self._contents[replica]
        held, own = contents.held, contents.own
        sampled, ends = self._sampled(page_hashes)
        pages: list[int] = sampled.tolist()
        matched = 0
        for page in pages:
            if page not in held and page not in own:
                break
            matched += 1
        pages = [page for page in pages if page not in held]
        self._booked += 1
        before = len(own)
        own.update(dict.fromkeys(pages, self._booked))
        self._num_pages += len(own) - before
        masks, bit = self._masks, contents.bit
        for page in pages:
            masks[page] = masks.get(page, 0) | bit
        self._open[key] = _Booking(self._booked, contents, pages, now + self._max_age_s)
        self._bound_memory()
        return ends[matched - 1] if matched else 0

    def settle(self, key: str, now: float) -> None:
        """The pages are there: the first token came. Their events have confirm_s to say so."""
        booking = self._open.pop(key, None)
        if booking is not None:
            self._confirming.append(booking._replace(deadline=now + self._confirm_s))
        self._expire(now)

    def cancel(self, key: str) -> None:
        """The request ended before its first token. Unknown or settled keys are ignored."""
        booking = self._open.pop(key, None)
        if booking is not None:
            self._drop(booking)

    def _sampled(self, page_hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Sequence[int]]:
        """The pages that this index keeps, and for each how many of the prompt's end with it."""
        limit = self._limit
        if limit == _HASHES:
            return page_hashes, range(1, len(page_hashes) + 1)
        kept = (page_hashes < limit).nonzero()[0]
        return page_hashes[kept], (kept + 1).tolist()

    def _enter_epoch(self, contents: _Contents, epoch: int) -> bool:
        """Whether epoch is the current one; a later one empties the replica first."""
        if contents.epoch is not None and epoch < contents.epoch:
            return False
        if contents.epoch != epoch:
            if contents.epoch is not None:
                self._clear(contents.held, contents)
                self._clear(contents.own, contents)
            contents.epoch = epoch
            contents.seq = 0
            contents.waiting = None
        return True

    def _apply(self, contents: _Contents, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self._store(contents, event.block_hashes)
            case BlockRemoved():
                self._remove(contents, event.block_hashes)
            case AllCleared():
                self._clear(contents.held, contents)
        contents.seq = event.seq

    def _store(self, contents: _Contents, pages: Iterable[int]) -> None:
        masks, held, own, bit = self._masks, contents.held, contents.own, contents.bit
        limit = self._limit
        for page in pages:
            if page >= limit or page in held:
                continue
            held.add(page)
            if own.pop(page, None) is None:
                self._num_pages += 1
                masks[page] = masks.get(page, 0) | bit

    def _remove(self, contents: _Contents, pages: Iterable[int]) -> None:
        held = contents.held
        gone = [page for page in pages if page in held]
        held.difference_update(gone)
        self._unset(contents, gone)

    def _clear(self, pages: set[int] | dict[int, int], contents: _Contents) -> None:
        """Empty contents.held or contents.own."""
        self._unset(contents, pages)
        pages.clear()

    def _drop(self, booking: _Booking) -> None:
        """Undo what is left of a booking: neither confirmed nor booked again since."""
        own = booking.contents.own
        gone = [page for page in booking.pages if own.get(page) == booking.number]
        for page in gone:
            del own[page]
        self._unset(booking.contents, gone)

    def _unset(self, contents: _Contents, pages: Iterable[int]) -> None:
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
        confirming, opened = self._confirming, self._open
        while confirming and confirming[0].deadline <= now:
            self._drop(confirming.popleft())
        while opened and next(iter(opened.values())).deadline <= now:
            self._drop(opened.popitem(last=False)[1])

    def _bound_memory(self) -> None:
        while self._num_pages > self._max_pages and self._limit > _LEAST_LIMIT:
            self._limit //= 2
            limit = self._limit
            for contents in self._contents.values():
                contents.held = {page for page in contents.held if page < limit}
                contents.own = {p: number for p, number in contents.own.items() if p < limit}
            self._masks = {page: mask for page, mask in self._masks.items() if page < limit}
            self._num_pages = sum(len(c.held) + len(c.own) for c in self._contents.values())
