from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from deploy.routing.prefix_index import ApplyResult, PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from engine.kvcache import RadixCache, TokenToKVPoolAllocator, hash_pages
from engine.protocol.messages import AllCleared, BlockRemoved, BlockStored, KVEvent
from tests.support.prefix_depth import depth_of

NAMES = ["a", "b", "c", "d", "e"]
CONFIRM_S = 10.0
MAX_AGE_S = 100.0
PAGES = st.integers(0, 11).map(lambda number: number * 2**64 // 12)
CHAINS = st.lists(PAGES, max_size=6, unique=True)


def stored(seq: int, *pages: int) -> BlockStored:
    return BlockStored(seq, list(pages), 0, "")


def removed(seq: int, *pages: int) -> BlockRemoved:
    return BlockRemoved(seq, list(pages))


def hashed(pages: list[int]) -> NDArray[np.uint64]:
    """As prompts carry their page hashes."""
    return np.array(pages, np.uint64)


def make_index(*names: str, **limits: float) -> PrefixIndex:
    slots = ReplicaSlots()
    index = PrefixIndex(slots, **limits)  # type: ignore[arg-type]
    for name in names:
        slots.add(name)
        index.add(name)
    return index


def kept_pages(prompt: list[int], sample: int) -> list[tuple[int, int]]:
    """Those that the index keeps, each after how many of the prompt's end with it."""
    return [(end, page) for end, page in enumerate(prompt, 1) if page < 2**64 // sample]


class Model:
    """A replica as it is, with the events that are on their way, and what the index may know."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seq = 0
        self.pages: set[int] = set()
        self.wire: deque[tuple[int, KVEvent]] = deque()
        self.known: set[int] = set()
        """What the index should hold by events."""
        self.known_seq = 0
        self.known_epoch: int | None = None
        self.gap = False
        self.late: list[tuple[int, KVEvent]] = []
        """Events that the index got behind a gap, oldest first."""

    def emit(self, event: KVEvent) -> None:
        self.seq = event.seq
        self.change(self.pages, event)
        self.wire.append((self.epoch, event))

    @staticmethod
    def change(pages: set[int], event: KVEvent) -> None:
        match event:
            case BlockStored():
                pages.update(event.block_hashes)
            case BlockRemoved():
                pages.difference_update(event.block_hashes)
            case AllCleared():
                pages.clear()


class IndexMachine(RuleBasedStateMachine):
    """Replicas that come, go, restart, and whose events are lost or late, against plain sets."""

    def __init__(self, sample_every: int) -> None:
        super().__init__()
        self.sample = sample_every
        self.slots = ReplicaSlots()
        self.index = PrefixIndex(
            self.slots, sample_every=sample_every, confirm_s=CONFIRM_S, max_age_s=MAX_AGE_S
        )
        self.models: dict[str, Model] = {}
        self.now = 0.0
        self.bookings: dict[str, tuple[str, list[int], float]] = {}
        """Open bookings by key: replica, pages, deadline."""
        self.settled: list[tuple[str, list[int], float, int]] = []
        self.number = 0
        self.owner: dict[tuple[str, int], int] = {}
        """Booked pages by replica: number of the latest booking."""
        self.numbers: dict[str, int] = {}

    # --- replicas

    @initialize()
    def start(self) -> None:
        for name in NAMES[:3]:
            self.add(name)

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        if name not in self.models:
            self.slots.add(name)
            self.index.add(name)
            self.models[name] = Model(epoch=1)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        if name in self.models:
            del self.models[name]
            self.index.forget(name)
            self.slots.remove(name)
            self.owner = {key: n for key, n in self.owner.items() if key[0] != name}
            self.bookings = {k: b for k, b in self.bookings.items() if b[0] != name}
            self.settled = [b for b in self.settled if b[0] != name]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        name = self.pick(data)
        old = self.models[name]
        fresh = Model(old.epoch + 1)
        fresh.known, fresh.known_seq, fresh.known_epoch = old.known, old.known_seq, old.known_epoch
        fresh.gap, fresh.late, fresh.wire = old.gap, old.late, old.wire
        self.models[name] = fresh

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.models)))

    # --- events

    @precondition(lambda self: self.models)
    @rule(data=st.data(), pages=CHAINS)
    def store(self, data: st.DataObject, pages: list[int]) -> None:
        model = self.models[self.pick(data)]
        pages = [page for page in pages if page not in model.pages]
        if pages:
            model.emit(stored(model.seq + 1, *pages))

    @precondition(lambda self: self.models)
    @rule(data=st.data(), pages=CHAINS)
    def evict(self, data: st.DataObject, pages: list[int]) -> None:
        model = self.models[self.pick(data)]
        pages = [page for page in pages if page in model.pages]
        if pages:
            model.emit(removed(model.seq + 1, *pages))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        model = self.models[self.pick(data)]
        model.emit(AllCleared(model.seq + 1))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        model = self.models[self.pick(data)]
        if model.wire:
            model.wire.popleft()

    @precondition(lambda self: self.models)
    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver(self, data: st.DataObject, count: int) -> None:
        name = self.pick(data)
        model = self.models[name]
        batch: list[tuple[int, KVEvent]] = []
        while model.wire and len(batch) < count:
            if batch and batch[0][0] != model.wire[0][0]:
                break
            batch.append(model.wire.popleft())
        if not batch:
            return
        epoch = batch[0][0]
        result = self.index.apply(name, epoch, [event for _, event in batch])
        assert result is self.expected(name, epoch, [event for _, event in batch])

    def expected(self, name: str, epoch: int, events: list[KVEvent]) -> ApplyResult:
        model = self.models[name]
        if not self.enter(name, epoch):
            return ApplyResult.STALE
        if model.gap:
            model.late += [(epoch, event) for event in events]
            return ApplyResult.WAITING
        changed = False
        for event in events:
            if event.seq <= model.known_seq:
                continue
            changed = True
            if not model.gap and event.seq != model.known_seq + 1:
                model.gap = True
            if model.gap:
                model.late.append((epoch, event))
                continue
            model.known_seq = event.seq
            Model.change(model.known, event)
            if isinstance(event, BlockStored):
                for page in event.block_hashes:
                    self.owner.pop((name, page), None)
        if model.gap:
            return ApplyResult.GAP
        return ApplyResult.APPLIED if changed else ApplyResult.STALE

    def enter(self, name: str, epoch: int) -> bool:
        model = self.models[name]
        if model.known_epoch is not None and epoch < model.known_epoch:
            return False
        if model.known_epoch != epoch:
            if model.known_epoch is not None:
                model.known = set()
                self.owner = {key: n for key, n in self.owner.items() if key[0] != name}
            model.known_epoch, model.known_seq, model.gap, model.late = epoch, 0, False, []
        return True

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        """Taken now and there at once; events that were on their way come later, as stale."""
        name = self.pick(data)
        model = self.models[name]
        result = self.index.load_snapshot(name, model.epoch, model.seq, sorted(model.pages))
        assert result is ApplyResult.APPLIED
        self.enter(name, model.epoch)
        model.known, model.known_seq = set(model.pages), model.seq
        model.gap, model.late = False, []
        for page in model.pages:
            self.owner.pop((name, page), None)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def sign_of_life(self, data: st.DataObject) -> None:
        name = self.pick(data)
        model = self.models[name]
        result = self.index.check_seq(name, model.epoch, model.seq)
        self.enter(name, model.epoch)
        if model.gap:
            assert result is ApplyResult.WAITING
        elif model.seq > model.known_seq:
            assert result is ApplyResult.GAP
            model.gap = True
        else:
            assert result is ApplyResult.APPLIED

    # --- bookings

    @precondition(lambda self: self.models)
    @rule(data=st.data(), key=st.sampled_from("xyz"), pages=CHAINS)
    def book(self, data: st.DataObject, key: str, pages: list[int]) -> None:
        name = self.pick(data)
        self.cancel(key)
        self.expire()
        held = 0
        for end, page in kept_pages(pages, self.sample):
            if page not in self.holds()[name]:
                break
            held = end
        assert self.index.book(key, name, hashed(pages), self.now) == held
        self.number += 1
        pages = [p for p in pages if p < 2**64 // self.sample and p not in self.models[name].known]
        self.bookings[key] = (name, pages, self.now + MAX_AGE_S)
        self.numbers[key] = self.number
        for page in pages:
            self.owner[name, page] = self.number

    @rule(key=st.sampled_from("xyz"))
    def cancel(self, key: str) -> None:
        self.index.cancel(key)
        if key in self.bookings:
            name, pages, _ = self.bookings.pop(key)
            self.drop(name, pages, self.numbers[key])

    @rule(key=st.sampled_from("xyz"))
    def settle(self, key: str) -> None:
        self.index.settle(key, self.now)
        if key in self.bookings:
            name, pages, _ = self.bookings.pop(key)
            self.settled.append((name, pages, self.now + CONFIRM_S, self.numbers[key]))
        self.expire()

    @rule(seconds=st.sampled_from([0.5, 9.0, 60.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; the index learns of it at the next booking or first token."""
        self.now += seconds

    def expire(self) -> None:
        for name, pages, deadline, number in list(self.settled):
            if deadline <= self.now:
                self.settled.remove((name, pages, deadline, number))
                self.drop(name, pages, number)
        for key, (name, pages, deadline) in list(self.bookings.items()):
            if deadline <= self.now:
                del self.bookings[key]
                self.drop(name, pages, self.numbers[key])

    def drop(self, name: str, pages: list[int], number: int) -> None:
        for page in pages:
            if self.owner.get((name, page)) == number:
                del self.owner[name, page]

    # --- what must hold

    def holds(self) -> dict[str, set[int]]:
        return {
            name: {page for page in model.known if page < 2**64 // self.sample}
            | {page for owner, page in self.owner if owner == name}
            for name, model in self.models.items()
        }

    @invariant()
    def same_pages(self) -> None:
        holds = self.holds()
        assert {name: set(self.index.pages_of(name)) for name in self.models} == holds
        assert self.index.num_pages == sum(map(len, holds.values()))
        waiting = {name for name, model in self.models.items() if model.gap}
        assert set(self.index.replicas_waiting) == waiting

    @rule(prompt=st.lists(PAGES, max_size=10))
    def match(self, prompt: list[int]) -> None:
        kept = kept_pages(prompt, self.sample)
        who = [
            sum(1 << self.slots.slot(name) for name, pages in self.holds().items() if page in pages)
            for _, page in kept
        ]
        match = self.index.match(hashed(prompt))
        known = len(match.ends)
        assert list(match.ends) == [end for end, _ in kept[:known]]
        assert [match.holders(level) for level in range(known)] == who[:known]
        # It ends before a page that nobody holds: the first, where caches are trees.
        assert known == 0 or who[known - 1]
        assert known == len(kept) or not who[known]


@pytest.mark.parametrize("sample_every", [1, 2])
def test_index_against_plain_sets(sample_every: int) -> None:
    run_state_machine_as_test(
        lambda: IndexMachine(sample_every),
        settings=settings(max_examples=40, stateful_step_count=40),
    )


def test_events_lost_while_the_snapshot_travels_are_seen() -> None:
    index = make_index("a")
    assert index.apply("a", 1, [stored(1, 1)]) is ApplyResult.APPLIED
    assert index.apply("a", 1, [stored(4, 4), stored(5, 5)]) is ApplyResult.GAP
    assert index.apply("a", 1, [stored(7, 7)]) is ApplyResult.WAITING
    assert index.pages_of("a") == {1}
    # The snapshot covers 3; 4 and 5 follow, 6 is missing: another one is due.
    assert index.load_snapshot("a", 1, 3, [1, 2, 3]) is ApplyResult.GAP
    assert index.pages_of("a") == {1, 2, 3, 4, 5}
    assert index.replicas_waiting == ["a"]
    assert index.load_snapshot("a", 1, 6, [5, 6]) is ApplyResult.APPLIED
    assert index.pages_of("a") == {5, 6, 7}
    assert index.replicas_waiting == []


def test_waiting_events_are_bounded() -> None:
    index = make_index("a", max_waiting=3)
    assert index.apply("a", 1, [stored(2, 2)]) is ApplyResult.GAP
    for seq in range(3, 9):
        assert index.apply("a", 1, [stored(seq, seq)]) is ApplyResult.WAITING
    # 2 to 5 have been dropped, so a snapshot of 1 doesn't reach the rest.
    assert index.load_snapshot("a", 1, 1, [1]) is ApplyResult.GAP
    assert index.load_snapshot("a", 1, 5, [5]) is ApplyResult.APPLIED
    assert index.pages_of("a") == {5, 6, 7, 8}


def test_strangers_and_old_lives_change_nothing() -> None:
    index = make_index("a")
    assert index.apply("b", 1, [stored(1, 1)]) is ApplyResult.UNKNOWN
    assert index.load_snapshot("b", 1, 1, [1]) is ApplyResult.UNKNOWN
    assert index.check_seq("b", 1, 1) is ApplyResult.UNKNOWN
    index.apply("a", 2, [stored(1, 1)])
    assert index.apply("a", 1, [stored(9, 9)]) is ApplyResult.STALE
    assert index.load_snapshot("a", 1, 9, [9]) is ApplyResult.STALE
    assert index.load_snapshot("a", 2, 0, [9]) is ApplyResult.STALE
    assert index.check_seq("a", 1, 9) is ApplyResult.STALE
    assert index.pages_of("a") == {1}
    with pytest.raises(KeyError):
        index.book("x", "b", hashed([1]), 0.0)


def test_a_slot_given_on_carries_nothing_over() -> None:
    slots = ReplicaSlots()
    index = PrefixIndex(slots)
    for name in ("a", "b"):
        slots.add(name)
        index.add(name)
        index.apply(name, 1, [stored(1, 10, 11)])
    index.book("x", "a", hashed([12]), 0.0)
    index.forget("a")
    assert slots.remove("a") == 0
    assert slots.add("c") == 0
    index.add("c")
    match = index.match(hashed([10, 11, 12]))
    assert list(match.ends) == [1, 2]
    assert match.holders(1) == 0b10
    # The request that was booked for a ends now, and mustn't touch c's account of the page.
    index.book("y", "c", hashed([12]), 0.0)
    index.cancel("x")
    assert index.pages_of("c") == {12}


def test_memory_is_bounded_by_keeping_fewer_pages() -> None:
    index = make_index("a", "b", max_pages=1000)
    pages = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64).tolist()
    index.apply("a", 1, [stored(1, *pages)])
    index.apply("b", 1, [stored(1, *pages[:500])])
    index.book("x", "b", hashed(pages[500:600]), 0.0)
    assert index.num_pages <= 1000
    sample = index.sample_every
    assert sample > 1
    assert index.pages_of("a") == {page for page in pages if page < 2**64 // sample}
    assert index.pages_of("b") == {page for page in pages[:600] if page < 2**64 // sample}
    kept = [i for i, page in enumerate(pages[:600]) if page < 2**64 // sample]
    assert depth_of(index.match(hashed(pages)), 1) == kept[-1] + 1
    # Pages that the index no longer keeps are evicted without a trace.
    index.apply("a", 1, [removed(2, *pages)])
    index.cancel("x")
    assert index.num_pages == len(index.pages_of("b"))


def test_follows_a_real_cache() -> None:
    """Random prompts through a RadixCache that evicts: the index ends with its very pages."""
    page_size = 4
    rng = np.random.default_rng(1)
    allocator = TokenToKVPoolAllocator(400, page_size)
    cache = RadixCache(allocator, page_size, enable_events=True)
    index = make_index("a")
    prompts = [rng.integers(0, 3, 40, dtype=np.int32) for _ in range(60)]
    lost = 0
    for number, prompt in enumerate(prompts):
        namespace = "salt" if number % 3 == 0 else ""
        known = len(cache.match_prefix(prompt, namespace).indices)
        while (slots := allocator.alloc_extend([known], [len(prompt)], [-1])) is None:
            cache.evict(40)
            known = len(cache.match_prefix(prompt, namespace).indices)
        row = np.zeros(len(prompt), np.int32)
        row[known:] = slots
        cache.insert(prompt, row, namespace)
        if number == 30:
            cache.reset()
        events = cache.drain_events()
        if number % 20 == 10 and events:
            events = events[1:]
            lost += 1
        if index.apply("a", 7, events) is ApplyResult.GAP or index.replicas_waiting:
            seq, blocks = cache.snapshot()
            hashes = [page for block in blocks for page in block.block_hashes]
            assert index.load_snapshot("a", 7, seq, hashes) is ApplyResult.APPLIED
        for other in prompts[: number + 1]:
            cached = len(cache.match_prefix(other, namespace).indices)
            hashes = hash_pages(other, page_size, namespace)
            assert depth_of(index.match(hashes), 0) * page_size == cached
    assert lost


@pytest.mark.parametrize("wrong", [{"sample_every": 3}, {"sample_every": 0}, {"max_pages": 0}])
def test_refuses_impossible_limits(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_index(**wrong)


def test_slots_are_recycled_lowest_first() -> None:
    slots = ReplicaSlots()
    assert [slots.add(name) for name in "abc"] == [0, 1, 2]
    assert slots.add("b") == 1
    slots.remove("a")
    slots.remove("b")
    assert [slots.add(name) for name in "de"] == [0, 1]
    assert (len(slots), slots.capacity, slots.names) == (3, 3, ["c", "d", "e"])
    assert slots.name(1) == "e"
    assert slots.get("a") is None
    slots.remove("c")
    for free in (2, 3, -1):
        with pytest.raises(KeyError):
            slots.name(free)
