"""`ExpertCounts`: how many tokens each expert of a mixture got."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertCounts:
    """Of one mixture, on its device. Nothing waits for the device but `tokens`."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.num_experts = num_experts
        self.sums = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        """By expert; the last is for numbers of no expert. Kernels add to it."""

    def add(self, chosen: Tensor, is_real: Tensor | None) -> None:
        """Count the `chosen` experts int64 [T, k] of T tokens. `is_real` bool [T]: those that don't
        only fill up a batch; None: all."""
        no_expert = (chosen < 0) | (chosen > self.num_experts)
        numbers = chosen.masked_fill(no_expert, self.num_experts).reshape(-1)
        if is_real is None:
            ones = torch.ones_like(numbers)
        else:
            ones = is_real.unsqueeze(1).expand(chosen.shape).reshape(-1).long()
        self.sums.index_add_(0, numbers, ones)

    def reset(self) -> None:
        """Begin anew."""
        self.sums.zero_()

    def tokens(self) -> list[int]:
        """[experts]: tokens that each got since the last `reset`."""
        found: list[int] = self.sums[: self.num_experts].tolist()
        return found
