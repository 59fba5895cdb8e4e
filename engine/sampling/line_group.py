"""`LineGroup`: some lines of a batch, those that one way of sampling is for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device


@dataclass(frozen=True)
class LineGroup:
    """Some lines of a batch. `index` int64 [count] on the device; None if it is all of them."""

    index: Tensor | None
    count: int

    def take(self, values: Tensor) -> Tensor:
        """The group's lines of `values` [S, ...]: `values` itself if the group has all lines."""
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write `values` [count, ...] to the group's lines of `target` [S, ...]."""
        if self.index is None:
            if target is not values:
                target.copy_(values)
        else:
            target.index_copy_(0, self.index, values)


def line_group(chosen: np.ndarray, device: torch.device) -> LineGroup | None:
    """The lines where `chosen` bool [S] is set."""
    lines = np.flatnonzero(chosen)
    if len(lines) == 0:
        return None
    if len(lines) == len(chosen):
        return LineGroup(None, len(lines))
    return LineGroup(to_device(lines, device), len(lines))
