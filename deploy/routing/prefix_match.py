"""Which replicas hold how much of a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PrefixMatch:
    """The replicas that hold a prompt's first pages, for one moment.

    Fields:
        ends: numbers of pages, increasing.
        holders: for as many of them as anybody holds, the replicas (bits by slot) that hold
            the first ends[i] pages; nested, i.e. each set is contained in the one before.
    """

    __slots__ = ("ends", "holders")

    def __init__(self, ends: Sequence[int], holders: list[int]) -> None:
        self.ends = ends
        self.holders = holders

    @property
    def num_pages(self) -> int:
        """Held by the replica that holds most."""
        return self.ends[len(self.holders) - 1] if self.holders else 0

    def pages_of(self, slot: int, at_least: float = 0) -> int:
        """Pages that this replica holds; 0 if they are fewer than at_least, which is cheaper."""
        bit = 1 << slot
        holders = self.holders
        last = len(holders) - 1
        if last < 0 or not holders[0] & bit:
            return 0
        if holders[last] & bit:
            return self.ends[last] if self.ends[last] >= at_least else 0
        low = bisect_left(self.ends, at_least, 0, last) if at_least > 0 else 0
        if not holders[low] & bit:
            return 0
        # It is in the set at low, and not in the one at last.
        while low + 1 < last:
            middle = (low + last) // 2
            if holders[middle] & bit:
                low = middle
            else:
                last = middle
        return self.ends[low]
