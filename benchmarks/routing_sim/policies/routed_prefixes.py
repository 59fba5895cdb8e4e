"""Which prompts were sent to which replica, as text-tree routers remember it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class RoutedMatch(NamedTuple):
    """The deepest known part of a prompt: its pages, and the slots it was sent to, in order."""

    num_pages: int
    slots: list[int]


class RoutedPrefixes:
    """Pages of the prompts that were routed, with the replicas they went to.

    Stands for the prefix trees of Ray's and SGLang's routers, in pages of tokens instead of
    characters. It says what was sent, not what is cached: nothing leaves it when a replica evicts.
    It keeps at most `max_pages` pages; those that were routed longest ago are dropped.
    """

    def __init__(self, max_pages: int = 4_000_000) -> None:
        self._max_pages = max_pages
        self._slots: OrderedDict[int, list[int]] = OrderedDict()
        self._sizes: dict[int, int] = {}

    def add(self, slot: int) -> None:
        self._sizes[slot] = 0

    def remove(self, slot: int) -> None:
        """Forget a replica; walks all pages."""
        del self._sizes[slot]
        for page in [page for page, slots in self._slots.items() if slot in slots]:
            self._slots[page].remove(slot)
            if not self._slots[page]:
                del self._slots[page]

    def size(self, slot: int) -> int:
        """Number of different pages that were sent to the replica."""
        return self._sizes[slot]

    def match(self, page_hashes: Sequence[int]) -> RoutedMatch:
        deepest: list[int] = []
        depth = 0
        for page in page_hashes:
            slots = self._slots.get(page)
            if slots is None:
                break
            deepest = slots
            depth += 1
        return RoutedMatch(depth, list(deepest))

    def insert(self, slot: int, page_hashes: Sequence[int]) -> None:
        """Note that a prompt was sent to the replica."""
        for page in page_hashes:
            slots = self._slots.setdefault(page, [])
            self._slots.move_to_end(page)
            if slot not in slots:
                slots.append(slot)
                self._sizes[slot] += 1
        while len(self._slots) > self._max_pages:
            _, slots = self._slots.popitem(last=False)
            for old in slots:
                self._sizes[old] -= 1
