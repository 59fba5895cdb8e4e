from __future__ import annotations

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

from engine.kvcache import KVPoolError, TokenToKVPoolAllocator

PAGE_SIZES = [1, 4, 16]
NUM_PAGES = 24


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against lists of slots, one for each request, with plain arithmetic."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        # Not a whole number of pages, so that the rounding shows.
        self.allocator = TokenToKVPoolAllocator((NUM_PAGES + 1) * page_size - 1, page_size)
        self.total_pages = self.allocator.num_pages
        self.requests: dict[int, list[int]] = {}
        self.next_id = 0

    def free_pages(self) -> int:
        held = sum(pages_for(len(slots), self.page_size) for slots in self.requests.values())
        return self.total_pages - held

    @rule(data=st.data(), num_new=st.integers(0, 3))
    def extend(self, data: st.DataObject, num_new: int) -> None:
        """Several requests at once: some new, some that grow."""
        for _ in range(num_new):
            self.requests[self.next_id] = []
            self.next_id += 1
        if not self.requests:
            return
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.requests)), unique=True, max_size=4)
        )
        add = [data.draw(st.integers(0, 5 * self.page_size)) for _ in chosen]
        prefix = [len(self.requests[i]) for i in chosen]
        seq = [p + a for p, a in zip(prefix, add, strict=True)]
        last = [self.requests[i][-1] if self.requests[i] else -1 for i in chosen]
        need = sum(
            pages_for(s, self.page_size) - pages_for(p, self.page_size)
            for s, p in zip(seq, prefix, strict=True)
        )
        assert self.allocator.pages_needed_extend(prefix, seq) == need
        room = self.free_pages()
        slots = self.allocator.alloc_extend(prefix, seq, last)
        if need > room:
            assert slots is None
            return
        assert slots is not None
        assert slots.dtype == np.int32
        assert len(slots) == sum(add)
        at = 0
        for i, count in zip(chosen, add, strict=True):
            self.requests[i] += slots[at : at + count].tolist()
            at += count

    @precondition(lambda self: any(self.requests.values()))
    @rule(as_arrays=st.booleans())
    def decode(self, as_arrays: bool) -> None:
        running = [i for i, slots in self.requests.items() if slots]
        seq = [len(self.requests[i]) + 1 for i in running]
        last = [self.requests[i][-1] for i in running]
        need = sum((s - 1) % self.page_size == 0 for s in seq)
        assert self.allocator.pages_needed_decode(seq) == need
        room = self.free_pages()
        if as_arrays:
            slots = self.allocator.alloc_decode(
                np.array(seq, dtype=np.int32), np.array(last, dtype=np.int32)
            )
        else:
            slots = self.allocator.alloc_decode(seq, last)
        if need > room:
            assert slots is None
            return
        assert slots is not None
        assert slots.dtype == np.int32
        for i, slot in zip(running, slots.tolist(), strict=True):
            self.requests[i].append(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Several requests in one call, in any order of their slots; then the double free."""
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.requests)), unique=True, max_size=3)
        )
        slots = [slot for i in chosen for slot in self.requests.pop(i)]
        slots = data.draw(st.permutations(slots))
        freed = np.array(slots, dtype=np.int32)
        self.allocator.free(freed)
        if slots:
            with pytest.raises(KVPoolError, match="twice"):
                self.allocator.free(freed)
            with pytest.raises(KVPoolError, match="twice"):
                self.allocator.free(freed[:1])

    @precondition(lambda self: any(self.requests.values()))
    @rule(data=st.data())
    def free_of_held_and_free_pages_changes_nothing(self, data: st.DataObject) -> None:
        free = self.allocator.free_pages()
        if len(free) == 0:
            return
        i = data.draw(st.sampled_from(sorted(i for i, s in self.requests.items() if s)))
        mixed = np.array([*self.requests[i], int(free[0]) * self.page_size], dtype=np.int32)
        with pytest.raises(KVPoolError, match="twice"):
            self.allocator.free(mixed)

    @rule()
    def clear(self) -> None:
        # Rarely useful in a run, so only when there's little to lose.
        if len(self.requests) < 2:
            self.allocator.clear()
            self.requests.clear()

    @invariant()
    def slots_are_laid_out_in_pages(self) -> None:
        size = self.page_size
        seen: set[int] = set()
        for slots in self.requests.values():
            for position, slot in enumerate(slots):
                assert size <= slot < (self.total_pages + 1) * size
                assert slot % size == position % size
                if position % size:
                    assert slot == slots[position - 1] + 1
                else:
                    assert slot // size not in seen
                    seen.add(slot // size)

    @invariant()
    def pages_are_conserved(self) -> None:
        assert self.allocator.available_size() == self.free_pages() * self.page_size
        held = {slot // self.page_size for slots in self.requests.values() for slot in slots}
        assert held.isdisjoint(self.allocator.free_pages().tolist())
        self.allocator.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_against_model(page_size: int) -> None:
    run_state_machine_as_test(
        lambda: AllocatorMachine(page_size),
        settings=settings(max_examples=40, stateful_step_count=40),
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_range_and_first_slots(page_size: int) -> None:
    allocator = TokenToKVPoolAllocator(10 * page_size, page_size)
    assert allocator.total_size == allocator.available_size() == 10 * page_size
    slots = allocator.alloc_extend([0], [10 * page_size], [-1])
    assert slots is not None
    assert slots.tolist() == list(range(page_size, 11 * page_size))
    assert allocator.available_size() == 0
    assert allocator.alloc_extend([0], [1], [-1]) is None
    assert allocator.alloc_decode([1], [-1]) is None


def test_last_in_first_out_in_order() -> None:
    allocator = TokenToKVPoolAllocator(8, 1)
    first = allocator.alloc_extend([0], [3], [-1])
    assert first is not None
    allocator.free(first)
    again = allocator.alloc_extend([0], [3], [-1])
    assert again is not None
    assert again.tolist() == first.tolist()


def test_result_is_no_view_of_the_free_stack() -> None:
    allocator = TokenToKVPoolAllocator(8, 1)
    slots = allocator.alloc_decode([1, 1], [-1, -1])
    assert slots is not None
    kept = slots.tolist()
    allocator.free(slots[::-1].copy())
    assert slots.tolist() == kept


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_empty_calls(page_size: int) -> None:
    allocator = TokenToKVPoolAllocator(4 * page_size, page_size)
    for slots in (allocator.alloc_extend([], [], []), allocator.alloc_decode([], [])):
        assert slots is not None
        assert slots.dtype == np.int32
        assert len(slots) == 0
    allocator.free(np.empty(0, dtype=np.int32))
    assert allocator.available_size() == 4 * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("page", [0, -1, 5])
def test_foreign_slots_are_refused(page_size: int, page: int) -> None:
    allocator = TokenToKVPoolAllocator(4 * page_size, page_size)
    held = allocator.alloc_extend([0], [1], [-1])
    assert held is not None
    with pytest.raises(KVPoolError, match="aren't all within"):
        allocator.free(np.array([int(held[0]), page * page_size], dtype=np.int32))
    assert allocator.available_size() == 3 * page_size


def test_a_repeated_slot_is_refused_where_slots_are_pages() -> None:
    allocator = TokenToKVPoolAllocator(4, 1)
    held = allocator.alloc_extend([0], [2], [-1])
    assert held is not None
    with pytest.raises(KVPoolError, match="twice in one call"):
        allocator.free(np.concatenate([held, held[:1]]))
    assert allocator.available_size() == 2


def test_inconsistent_lengths_are_refused_and_change_nothing() -> None:
    allocator = TokenToKVPoolAllocator(64, 16)
    held = allocator.alloc_extend([0], [5], [-1])
    assert held is not None
    room = allocator.available_size()
    with pytest.raises(KVPoolError, match="below its prefix_len"):
        allocator.alloc_extend([5], [4], [int(held[-1])])
    with pytest.raises(KVPoolError, match="doesn't fit its prefix_len"):
        allocator.alloc_extend([5], [9], [int(held[-2])])
    with pytest.raises(KVPoolError, match="doesn't fit its seq_len"):
        allocator.alloc_decode([6, 17], [int(held[-2]), 31])
    assert allocator.available_size() == room
    allocator.check_integrity()


@pytest.mark.parametrize(("num_tokens", "page_size"), [(0, 1), (15, 16), (16, 0)])
def test_impossible_sizes_are_refused(num_tokens: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="page"):
        TokenToKVPoolAllocator(num_tokens, page_size)
