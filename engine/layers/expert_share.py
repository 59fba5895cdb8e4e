"""`ExpertShare`: which of a mixture's experts a rank has, and whose sums are added to its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device.distributed import ParallelState


class ExpertShare:
    """Some of the experts, each whole or a part of its inner numbers."""

    def __init__(self, experts: Sequence[int], num_experts: int, sum_over: ParallelState) -> None:
        """`experts`: ascending, of `num_experts`. `sum_over`: the ranks that have the others, and
        the other parts."""
        self.count, self.sum_over = len(experts), sum_over
        self.num_experts = num_experts
        self._first = experts[0]
        self._places: Tensor | None = None
        """int64 [num_experts + 1]: of each expert, `count` for those of other ranks and at the end.
        None: the experts follow one another."""
        if experts[-1] - experts[0] >= self.count:
            self._places = torch.full((num_experts + 1,), self.count)
            self._places[torch.tensor(experts)] = torch.arange(self.count)

    def local(self, chosen: Tensor) -> Tensor:
        """Numbers of experts among those of the rank; others are below 0, or `count` and more."""
        if self._places is None:
            return chosen - self._first if self._first else chosen
        if self._places.device != chosen.device:
            self._places = self._places.to(chosen.device)
        return self._places[chosen.clamp(-1, self.num_experts)]
