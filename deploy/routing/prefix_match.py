"""How much of one prompt the replicas hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class PrefixMatch:
    """The pages of a prompt that some replica holds, and by whom each is held.

    Level i is the i-th page of the prompt that the index keeps (it may keep only some of them).
    `ends[i]` is the number of pages of the prompt up to this page and with it. The numbers grow;
    `ends[-1]` is the longest prefix that any replica holds, and `ends` is empty if none holds
    anything.
    """

    __slots__ = ("_masks", "_pages", "ends")

    def __init__(
        self, ends: Sequence[int], pages: NDArray[np.uint64], masks: Mapping[int, int]
    ) -> None:
        self.ends = ends
        self._pages = pages
        self._masks = masks

    def holders(self, level: int) -> int:
        """Replicas that hold the prefix of this level, as bits by slot.

        Whoever holds a level holds every level before it.
        """
        return self._masks.get(self._pages.item(level), 0)
