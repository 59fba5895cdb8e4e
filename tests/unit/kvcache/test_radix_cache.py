from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kvcache import KVPoolError, RadixCache, TokenToKVPoolAllocator, TreeNode, hash_pages
from engine.kvcache.kv_events import KVEventLog
from engine.kvcache.page_hash import chain_hashes, root_hash
from engine.protocol.messages import AllCleared, BlockRemoved, BlockStored, KVEvent

PAGE_SIZES = [1, 4, 16]
NAMESPACES = ["", "salt"]
GOLDEN_HASHES = [7356754698806402580, 4998129498157500886]
PageKey = tuple[str, tuple[int, ...]]


def page_tokens(word: int, page_size: int) -> list[int]:
    """A page that differs from the other words' pages only late, so that keys share starts."""
    return [7] * (page_size - 1) + [word] if page_size > 1 else [word]


@st.composite
def prompts(draw: st.DrawFn, page_size: int) -> list[int]:
    words = draw(st.lists(st.integers(0, 2), max_size=6))
    tail = draw(st.integers(0, page_size - 1))
    return [t for word in words for t in page_tokens(word, page_size)] + [7] * tail


class EventReader:
    """A subscriber: the set of pages that it believes the tree holds."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.seq = 0
        self.roots = {root_hash(namespace) for namespace in NAMESPACES}

    def apply(self, event: KVEvent) -> None:
        assert event.seq == self.seq + 1
        self.seq = event.seq
        match event:
            case BlockStored():
                self.store(event)
            case BlockRemoved():
                for page in event.block_hashes:
                    self.pages.remove(page)
            case AllCleared():
                self.pages.clear()

    def store(self, event: BlockStored) -> None:
        assert event.parent_hash in self.pages | self.roots
        assert self.pages.isdisjoint(event.block_hashes)
        assert len(set(event.block_hashes)) == len(event.block_hashes) > 0
        self.pages.update(event.block_hashes)


@dataclass
class Running:
    """A request as a scheduler holds it: its row, and how much of that the tree owns."""

    namespace: str
    tokens: list[int]
    slots: np.ndarray
    owned_by_tree: int
    node: TreeNode


class RadixMachine(RuleBasedStateMachine):
    """The tree under requests, against a dict from (namespace, prefix) to its last page's slots."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.allocator = TokenToKVPoolAllocator(30 * page_size, page_size)
        self.cache = RadixCache(self.allocator, page_size, enable_events=True)
        self.model: dict[PageKey, list[int]] = {}
        self.last_use: dict[PageKey, int] = {}
        self.tick = 0
        self.running: list[Running] = []
        self.locked: list[tuple[str, list[int], TreeNode]] = []
        self.reader = EventReader()

    def page_keys(self, namespace: str, tokens: list[int]) -> list[PageKey]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def locked_keys(self) -> set[PageKey]:
        paths = [(r.namespace, r.tokens[: r.owned_by_tree]) for r in self.running]
        paths += [(namespace, tokens) for namespace, tokens, _ in self.locked]
        return {key for namespace, tokens in paths for key in self.page_keys(namespace, tokens)}

    def leaves(self) -> set[PageKey]:
        parents = {(ns, tokens[: -self.page_size]) for ns, tokens in self.model}
        return set(self.model) - parents

    def match(self, namespace: str, tokens: list[int]) -> tuple[np.ndarray, TreeNode]:
        """match_prefix, checked against the model."""
        self.tick += 1
        expected: list[int] = []
        for key in self.page_keys(namespace, tokens):
            if key not in self.model:
                break
            expected += self.model[key]
            self.last_use[key] = self.tick
        result = self.cache.match_prefix(np.array(tokens, dtype=np.int32), namespace)
        assert result.indices.dtype == np.int32
        assert result.indices.tolist() == expected
        return result

    def insert(self, request: Running) -> int:
        """insert, checked against the model. Returns the tokens that the tree has now."""
        self.tick += 1
        held = 0
        for number, key in enumerate(self.page_keys(request.namespace, request.tokens)):
            self.last_use[key] = self.tick
            if key in self.model:
                held += self.page_size
            else:
                start = number * self.page_size
                page = request.slots[start : start + self.page_size]
                self.model[key] = page.tolist()
        view = request.slots[:]
        result = self.cache.insert(
            np.array(request.tokens, dtype=np.int32), view, request.namespace
        )
        assert result.prefix_len == held
        # Duplicates: those of the held tokens that weren't matched when the request began.
        self.allocator.free(request.slots[request.owned_by_tree : held].copy())
        # The tree must have copied: whatever happens to the row now can't reach it.
        request.slots = request.slots.copy()
        view[:] = -1
        return len(request.tokens) // self.page_size * self.page_size

    def evict(self, num_tokens: int) -> int:
        locked = self.locked_keys()
        before = set(self.model)
        available = self.allocator.available_size()
        freed = self.cache.evict(num_tokens)
        assert self.allocator.available_size() == available + freed
        kept = set(self.cache.all_indices().tolist())
        gone = {key for key in before if self.model[key][0] not in kept}
        assert len(gone) * self.page_size == freed
        assert gone.isdisjoint(locked)
        for key in gone:
            del self.model[key]
        assert freed >= num_tokens or set(self.model) == before & locked
        # Ancestors stay as long as anything below them does.
        for namespace, tokens in self.model:
            parent = tokens[: -self.page_size]
            assert not parent or (namespace, parent) in self.model
        # LRU: nothing that could have gone is older than what went.
        candidates = self.leaves() - locked
        if gone and candidates:
            newest_gone = max(self.last_use[key] for key in gone)
            assert newest_gone <= min(self.last_use[key] for key in candidates)
        return freed

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def match_only(self, data: st.DataObject, namespace: str) -> None:
        self.match(namespace, data.draw(prompts(self.page_size)))

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def start(self, data: st.DataObject, namespace: str) -> None:
        """Admission: match, lock, evict if needed, allocate the rest."""
        tokens = data.draw(prompts(self.page_size))
        indices, node = self.match(namespace, tokens)
        self.cache.inc_lock_ref(node)
        prefix = len(indices)
        self.locked.append((namespace, tokens[:prefix], node))
        missing = self.allocator.pages_needed_extend([prefix], [len(tokens)]) * self.page_size
        if missing > self.allocator.available_size():
            self.evict(missing - self.allocator.available_size())
        last = [int(indices[-1]) if prefix else -1]
        slots = self.allocator.alloc_extend([prefix], [len(tokens)], last)
        if slots is None:
            self.locked.pop()
            self.cache.dec_lock_ref(node)
            return
        self.locked.pop()
        row = np.concatenate([indices, slots])
        self.running.append(Running(namespace, tokens, row, prefix, node))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), word=st.integers(0, 2))
    def decode(self, data: st.DataObject, word: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        last = [int(request.slots[-1]) if len(request.slots) else -1]
        slot = self.allocator.alloc_decode([len(request.tokens) + 1], last)
        if slot is not None:
            request.tokens = [*request.tokens, word]
            request.slots = np.concatenate([request.slots, slot])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        """Share what's computed so far and go on (chunked prefill)."""
        request = data.draw(st.sampled_from(self.running))
        aligned = self.insert(request)
        indices, node = self.match(request.namespace, request.tokens)
        assert len(indices) == aligned
        request.slots[:aligned] = indices
        self.cache.inc_lock_ref(node)
        self.cache.dec_lock_ref(request.node)
        request.node = node
        request.owned_by_tree = aligned

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        aligned = self.insert(request)
        self.allocator.free(request.slots[aligned:])
        self.cache.dec_lock_ref(request.node)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.allocator.free(request.slots[request.owned_by_tree :])
        self.cache.dec_lock_ref(request.node)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES))
    def lock(self, data: st.DataObject, namespace: str) -> None:
        tokens = data.draw(prompts(self.page_size))
        indices, node = self.match(namespace, tokens)
        self.cache.inc_lock_ref(node)
        self.locked.append((namespace, tokens[: len(indices)], node))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        _, _, node = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.dec_lock_ref(node)

    @rule(pages=st.integers(0, 12))
    def evict_some(self, pages: int) -> None:
        self.evict(pages * self.page_size)

    @precondition(lambda self: len(self.model) > 8)
    @rule()
    def reset(self) -> None:
        if self.locked_keys():
            with pytest.raises(KVPoolError, match="locked"):
                self.cache.reset()
        else:
            self.cache.reset()
            self.model.clear()

    @rule()
    def snapshot(self) -> None:
        """A subscriber that saw a gap starts again from here."""
        self.cache.drain_events()
        seq, stored = self.cache.snapshot()
        self.reader = EventReader()
        for event in stored:
            assert event.seq == seq
            self.reader.store(event)
        self.reader.seq = seq

    @invariant()
    def sizes_agree(self) -> None:
        cache = self.cache
        size = self.page_size
        cache.check_integrity()
        slots = {slot for page in self.model.values() for slot in page}
        assert set(cache.all_indices().tolist()) == slots
        assert cache.total_size == len(self.model) * size
        assert cache.protected_size == len(self.locked_keys()) * size
        assert cache.evictable_size == cache.total_size - cache.protected_size

    @invariant()
    def tokens_are_conserved(self) -> None:
        self.allocator.check_integrity()
        size = self.page_size
        held = sum(-(-(len(r.slots) - r.owned_by_tree) // size) * size for r in self.running)
        free = self.allocator.available_size()
        assert free + self.cache.total_size + held == self.allocator.total_size

    @invariant()
    def events_replay_to_the_tree(self) -> None:
        for event in self.cache.drain_events():
            self.reader.apply(event)
        hashes = {
            int(hash_pages(np.array(tokens, dtype=np.int32), self.page_size, namespace)[-1])
            for namespace, tokens in self.model
        }
        assert self.reader.pages == hashes


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_against_model(page_size: int) -> None:
    run_state_machine_as_test(
        lambda: RadixMachine(page_size),
        settings=settings(max_examples=35, stateful_step_count=40),
    )


class Tree:
    """A cache of its own for one test, with tokens given as words, each a page of 4."""

    def __init__(self, eviction_policy: str = "lru", *, events: bool = False) -> None:
        self.allocator = TokenToKVPoolAllocator(4 * 100, 4)
        self.cache = RadixCache(
            self.allocator, 4, eviction_policy=eviction_policy, enable_events=events
        )

    def tokens(self, words: list[int]) -> np.ndarray:
        pages = [t for word in words for t in page_tokens(word, 4)]
        return np.array(pages, dtype=np.int32)

    def put(self, words: list[int], namespace: str = "", priority: int = 0) -> TreeNode:
        """A whole request: match, allocate the rest, insert."""
        tokens = self.tokens(words)
        indices, _ = self.cache.match_prefix(tokens, namespace)
        last = [int(indices[-1]) if len(indices) else -1]
        slots = self.allocator.alloc_extend([len(indices)], [len(tokens)], last)
        assert slots is not None
        row = np.concatenate([indices, slots])
        return self.cache.insert(tokens, row, namespace, priority).last_node

    def matched(self, words: list[int], namespace: str = "") -> int:
        """Matched words; a match marks them as used."""
        return len(self.cache.match_prefix(self.tokens(words), namespace).indices) // 4

    def held(self, *paths: list[int]) -> list[bool]:
        """Which whole paths are in the tree, read from a snapshot: marks nothing as used."""
        _, stored = self.cache.snapshot()
        hashes = {page for event in stored for page in event.block_hashes}
        return [int(hash_pages(self.tokens(path), 4)[-1]) in hashes for path in paths]


def test_match_and_split_at_a_page_boundary() -> None:
    tree = Tree()
    leaf = tree.put([1, 2, 3, 4])
    found = tree.cache.match_prefix(np.append(tree.tokens([1, 2]), [7, 7, 7, 9]).astype(np.int32))
    assert len(found.indices) == 8
    assert found.last_node is leaf.parent
    assert leaf.num_tokens == 8
    assert leaf.parent is not None
    assert leaf.parent.num_tokens == 8
    tree.cache.check_integrity()
    assert tree.matched([1, 2, 3, 4]) == 4


def test_partial_last_page_neither_matches_nor_enters() -> None:
    tree = Tree()
    slots = tree.allocator.alloc_extend([0], [11], [-1])
    assert slots is not None
    tokens = np.arange(11, dtype=np.int32)
    assert tree.cache.insert(tokens, slots).prefix_len == 0
    assert tree.cache.total_size == 8
    assert len(tree.cache.match_prefix(tokens).indices) == 8
    assert len(tree.cache.match_prefix(tokens[:7]).indices) == 4
    assert len(tree.cache.match_prefix(tokens[:3]).indices) == 0
    # The tail is still the caller's.
    tree.allocator.free(slots[8:])
    tree.cache.reset()
    assert tree.allocator.available_size() == tree.allocator.total_size


def test_insert_copies_a_view_of_the_row() -> None:
    tree = Tree()
    row = np.zeros(16, dtype=np.int32)
    slots = tree.allocator.alloc_extend([0], [8], [-1])
    assert slots is not None
    row[:8] = slots
    tokens = np.arange(8, dtype=np.int32)
    tree.cache.insert(tokens, row[:8])
    row[:] = 99
    found = tree.cache.match_prefix(tokens).indices
    assert found.tolist() == slots.tolist()
    found[:] = 77
    assert tree.cache.match_prefix(tokens).indices.tolist() == slots.tolist()


def test_duplicates_are_left_to_the_caller() -> None:
    tree = Tree()
    tokens = tree.tokens([1, 2, 3])
    first = tree.allocator.alloc_extend([0], [8], [-1])
    second = tree.allocator.alloc_extend([0], [12], [-1])
    assert first is not None
    assert second is not None
    tree.cache.insert(tokens[:8], first)
    assert tree.cache.insert(tokens, second).prefix_len == 8
    assert tree.cache.match_prefix(tokens).indices.tolist() == [*first, *second[8:]]
    tree.allocator.free(second[:8])
    tree.cache.check_integrity()


def test_other_integer_types_match_the_same_tokens() -> None:
    tree = Tree()
    tree.put([1, 2])
    wide = tree.tokens([1, 2]).astype(np.int64)
    assert len(tree.cache.match_prefix(wide).indices) == 8
    strided = np.repeat(tree.tokens([1, 2]), 2)[::2]
    assert len(tree.cache.match_prefix(strided).indices) == 8


def test_too_few_slots_are_refused() -> None:
    tree = Tree()
    with pytest.raises(ValueError, match="8 tokens but only 4 slots"):
        tree.cache.insert(tree.tokens([1, 2]), np.arange(4, 8, dtype=np.int32))


def test_namespaces_never_meet_and_vanish_when_empty() -> None:
    tree = Tree(events=True)
    tree.put([1, 2], "a")
    assert tree.matched([1, 2]) == 0
    assert tree.matched([1, 2], "b") == 0
    tree.put([1, 2], "b")
    assert tree.cache.total_size == 16
    _, stored = tree.cache.snapshot()
    assert len({page for event in stored for page in event.block_hashes}) == 4
    assert sorted(event.namespace for event in stored) == ["a", "b"]
    assert tree.cache.evict(1) == 8
    tree.cache.check_integrity()
    assert tree.matched([1, 2], "a") == 0
    assert tree.matched([1, 2], "b") == 2


def test_empty_matches_end_on_the_root_and_lock_nothing() -> None:
    tree = Tree()
    node = tree.cache.match_prefix(tree.tokens([1]), "unknown").last_node
    assert node is tree.cache.root
    assert node.is_root
    tree.cache.inc_lock_ref(node)
    tree.cache.dec_lock_ref(node)
    tree.put([2])
    assert tree.cache.match_prefix(tree.tokens([1])).last_node is tree.cache.root
    assert tree.cache.protected_size == 0


def test_locks_cover_ancestors_and_survive_splits() -> None:
    tree = Tree()
    deep = tree.put([1, 2, 3])
    tree.cache.inc_lock_ref(deep)
    tree.put([1, 9])
    # The handle still stands for the whole of 1, 2, 3 although its node was split.
    assert tree.cache.protected_size == 12
    assert tree.cache.evict(1000) == 4
    assert tree.matched([1, 2, 3]) == 3
    tree.cache.dec_lock_ref(deep)
    assert tree.cache.protected_size == 0
    assert tree.cache.evict(1000) == 12
    assert tree.allocator.available_size() == tree.allocator.total_size


def test_lock_underflow_and_stale_handles_raise() -> None:
    tree = Tree()
    node = tree.put([1])
    with pytest.raises(KVPoolError, match="isn't locked"):
        tree.cache.dec_lock_ref(node)
    tree.cache.evict(4)
    with pytest.raises(KVPoolError, match="has been evicted"):
        tree.cache.inc_lock_ref(node)
    with pytest.raises(KVPoolError, match="isn't locked"):
        tree.cache.dec_lock_ref(node)
    node = tree.put([1])
    tree.cache.reset()
    with pytest.raises(KVPoolError, match="has been evicted"):
        tree.cache.inc_lock_ref(node)


def test_reset_refuses_while_something_is_locked() -> None:
    tree = Tree()
    node = tree.put([1])
    tree.cache.inc_lock_ref(node)
    with pytest.raises(KVPoolError, match="4 tokens are locked"):
        tree.cache.reset()
    assert tree.matched([1]) == 1


def test_lru_order_follows_matches() -> None:
    tree = Tree(events=True)
    for word in (1, 2, 3):
        tree.put([word])
    tree.matched([1])
    tree.cache.evict(4)
    assert tree.held([1], [2], [3]) == [True, False, True]
    tree.cache.evict(4)
    assert tree.held([1], [3]) == [True, False]


def test_lru_order_survives_a_split() -> None:
    tree = Tree(events=True)
    tree.put([1, 2, 3])
    tree.put([5])
    # Only 1 is used again: 2, 3 stay older than 5, and 1 gets younger.
    assert tree.matched([1, 8]) == 1
    assert tree.cache.evict(1) == 8
    assert tree.held([1], [1, 2], [5]) == [True, False, True]
    assert tree.cache.evict(1) == 4
    assert tree.held([1], [5]) == [True, False]


def test_a_leaf_touched_while_locked_is_as_young_as_that() -> None:
    tree = Tree(events=True)
    first = tree.put([1])
    tree.put([2])
    tree.cache.inc_lock_ref(first)
    # Pops and drops the first's entry: it's locked.
    assert tree.cache.evict(4) == 4
    tree.put([3])
    tree.matched([1])
    tree.cache.dec_lock_ref(first)
    tree.cache.check_integrity()
    tree.cache.evict(4)
    assert tree.held([1], [3]) == [True, False]


def test_lfu_keeps_what_many_requests_used() -> None:
    tree = Tree("lfu", events=True)
    for _ in range(3):
        tree.put([1])
    tree.put([2])
    # Looking doesn't count, or a waiting request would vote in every scheduling pass.
    for _ in range(5):
        tree.matched([2])
    tree.cache.evict(4)
    assert tree.held([1], [2]) == [True, False]


def test_fifo_ignores_use() -> None:
    tree = Tree("fifo", events=True)
    tree.put([1])
    tree.put([2])
    tree.put([1])
    tree.matched([1])
    tree.cache.evict(4)
    assert tree.held([1], [2]) == [False, True]


def test_priority_goes_before_age_and_the_highest_counts() -> None:
    tree = Tree("priority", events=True)
    tree.put([1], priority=5)
    tree.put([2], priority=0)
    tree.put([3], priority=1)
    tree.put([2], priority=3)
    tree.cache.evict(4)
    assert tree.held([1], [2], [3]) == [True, True, False]
    tree.cache.evict(4)
    assert tree.held([1], [2]) == [True, False]


def test_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="choose one of lru, lfu, fifo, priority"):
        Tree("mru")


def test_page_size_must_be_the_allocators() -> None:
    with pytest.raises(ValueError, match="isn't the allocator's 4"):
        RadixCache(TokenToKVPoolAllocator(16, 4), 1)


def test_disabled_cache_holds_nothing() -> None:
    allocator = TokenToKVPoolAllocator(16, 4)
    cache = RadixCache(allocator, 4, disable=True, enable_events=True)
    tokens = np.arange(8, dtype=np.int32)
    slots = allocator.alloc_extend([0], [8], [-1])
    assert slots is not None
    assert cache.insert(tokens, slots) == (0, cache.root)
    indices, node = cache.match_prefix(tokens)
    assert len(indices) == 0
    assert node is cache.root
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    assert cache.evict(8) == 0
    assert cache.drain_events() == []
    allocator.free(slots)


def test_no_events_unless_asked() -> None:
    tree = Tree()
    node = tree.put([1, 2])
    assert tree.cache.drain_events() == []
    assert node.hashes == []
    with pytest.raises(KVPoolError, match="enable_events"):
        tree.cache.snapshot()


def test_events_name_chains_and_splits_are_silent() -> None:
    tree = Tree(events=True)
    tree.put([1, 2, 3])
    one = hash_pages(tree.tokens([1, 2, 3]), 4).tolist()
    assert tree.cache.drain_events() == [BlockStored(1, one, root_hash(), "")]
    tree.put([1, 2, 9])
    other = hash_pages(tree.tokens([1, 2, 9]), 4).tolist()
    assert tree.cache.drain_events() == [BlockStored(2, other[2:], one[1], "")]
    tree.cache.evict(4)
    assert tree.cache.drain_events() == [BlockRemoved(3, one[2:])]
    tree.cache.reset()
    assert tree.cache.drain_events() == [AllCleared(4)]


def test_events_travel_as_messagepack() -> None:
    events: list[KVEvent] = [
        BlockStored(1, [2**64 - 1], 0, "x"),
        BlockRemoved(2, [1]),
        AllCleared(3),
    ]
    raw = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(raw, type=list[BlockStored | BlockRemoved | AllCleared]) == events


def test_an_overfull_event_log_shows_as_a_gap() -> None:
    log = KVEventLog(max_pending=2)
    for _ in range(3):
        log.cleared()
    assert [event.seq for event in log.drain()] == [2, 3]
    assert log.seq == 3


def test_page_hashes_are_chained_and_stable() -> None:
    tokens = np.arange(10, dtype=np.int32)
    hashes = hash_pages(tokens, 4)
    assert hashes.dtype == np.uint64
    # Fixed for ever: other processes and versions compare with them.
    assert hashes.tolist() == GOLDEN_HASHES
    assert hash_pages(tokens[:8], 4).tolist() == GOLDEN_HASHES
    assert hash_pages(tokens.astype(np.int64), 4).tolist() == GOLDEN_HASHES
    assert len(hash_pages(tokens[:3], 4)) == 0
    changed = tokens.copy()
    changed[0] = 5
    assert not set(hash_pages(changed, 4).tolist()) & set(GOLDEN_HASHES)
    assert not set(hash_pages(tokens, 4, "salt").tolist()) & set(GOLDEN_HASHES)


def break_size(tree: Tree, node: TreeNode) -> None:
    tree.cache._evictable_size += 4


def break_parent(tree: Tree, node: TreeNode) -> None:
    node.parent = tree.cache.root


def break_child_key(tree: Tree, node: TreeNode) -> None:
    assert node.parent is not None
    node.parent.children[b"elsewhere"] = node.parent.children.pop(node.key[:16])


def break_alignment(tree: Tree, node: TreeNode) -> None:
    node.indices = node.indices + 1


def break_locks(tree: Tree, node: TreeNode) -> None:
    node.lock_ref = 1


def break_slots(tree: Tree, node: TreeNode) -> None:
    assert node.parent is not None
    node.indices = node.parent.indices[:4].copy()


def break_length(tree: Tree, node: TreeNode) -> None:
    node.indices = np.append(node.indices, node.indices)


def break_hashes(tree: Tree, node: TreeNode) -> None:
    node.hashes = [1]


def break_queue(tree: Tree, node: TreeNode) -> None:
    tree.cache._queue.clear()


def break_ownership(tree: Tree, node: TreeNode) -> None:
    tree.allocator.free(node.indices)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_size, "the counters say"),
        (break_parent, "point back"),
        (break_child_key, "filed under another page"),
        (break_alignment, "whole pages"),
        (break_locks, "fewer locks than a child"),
        (break_slots, "in the tree twice"),
        (break_length, "8 slots, 4 tokens"),
        (break_hashes, "wrong page hashes"),
        (break_queue, "isn't in the eviction queue"),
        (break_ownership, "calls free"),
    ],
)
def test_check_integrity_names_the_damage(
    damage: Callable[[Tree, TreeNode], None], message: str
) -> None:
    tree = Tree(events=True)
    tree.put([1, 2])
    leaf = tree.put([1, 3])
    tree.cache.check_integrity()
    damage(tree, leaf)
    with pytest.raises(KVPoolError, match=message):
        tree.cache.check_integrity()


def test_page_hashes_that_are_known_are_not_computed_again() -> None:
    allocator = TokenToKVPoolAllocator(64, 4)
    cache = RadixCache(allocator, 4, enable_events=True)
    tokens = np.arange(16, dtype=np.int32)
    slots = allocator.alloc_extend([0], [16], [-1])
    assert slots is not None
    cache.insert(tokens[:4], slots[:4], page_hashes=[11])
    cache.insert(tokens, slots, page_hashes=[11, 22, 33])
    first, second = cache.drain_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert first.block_hashes == [11]
    # What isn't known continues the chain.
    assert second.block_hashes == [22, 33, *chain_hashes(tokens[12:].tobytes(), 4, 33)]
    assert second.parent_hash == 11
