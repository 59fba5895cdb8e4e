"""`ExpertShare`: which of a mixture's experts a rank has, and whose sums are added to its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.device.distributed import ParallelState


@dataclass(frozen=True)
class ExpertShare:
    """`count` experts from number `first` on, each whole or a part of its inner numbers."""

    first: int
    count: int
    sum_over: ParallelState
    """The ranks that have the others, and the other parts."""

    def local(self, chosen: Tensor) -> Tensor:
        """Numbers of experts among those of the rank; others are below 0, or `count` and more."""
        return chosen - self.first if self.first else chosen
