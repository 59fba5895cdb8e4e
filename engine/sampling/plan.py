"""What the host knows about a batch before sampling it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.sampling.logprobs import ListedTokens


class Draw(IntEnum):
    """How a slot's token is chosen."""

    GREEDY = 0
    """The likeliest token."""
    FULL = 1
    """Any token of the vocabulary (that passes min_p)."""
    NUCLEUS = 2
    """top_p without top_k."""
    TOP_K = 3
    """top_k, perhaps with top_p."""


@dataclass(frozen=True)
class RowGroup:
    """Some rows of a batch. `index` int64 [count] on the device; None if it is all of them."""

    index: Tensor | None
    count: int

    def take(self, values: Tensor) -> Tensor:
        """The group's rows of `values` [S, ...]: `values` itself if the group has all rows."""
        return values if self.index is None else values.index_select(0, self.index)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write `values` [count, ...] to the group's rows of `target` [S, ...]."""
        if self.index is None:
            if target is not values:
                target.copy_(values)
        else:
            target.index_copy_(0, self.index, values)


@dataclass(frozen=True)
class PenaltyGroup:
    """Rows with penalties; `pool_rows` int64 [count] are their rows in the `PenaltyPool`."""

    rows: RowGroup
    pool_rows: Tensor
    repetition: bool
    presence: bool
    frequency: bool


@dataclass(frozen=True)
class SparseBias:
    """`values` float32 [N] to add at `index` int64 [N] of the flattened logits."""

    index: Tensor
    values: Tensor


@dataclass(frozen=True)
class BannedTokens:
    """Entries of the flattened logits forbidden while their `rows` int64 [N] are too short."""

    index: Tensor
    rows: Tensor


@dataclass(frozen=True)
class LogprobGroup:
    """Rows that want log-probabilities, and how many alternatives each (host int [count])."""

    rows: RowGroup
    num_top: np.ndarray
    batch_rows: np.ndarray
    """int64 [count]: the rows' numbers in the batch."""
    listed: ListedTokens | None = None
    """Tokens that rows named instead of asking for the likeliest."""


@dataclass(frozen=True)
class SamplingPlan:
    """Row groups and flags of one batch composition; a feature that no row uses is None."""

    draws: dict[Draw, RowGroup]
    uses_min_p: bool = False
    max_top_k: int = 0
    penalties: PenaltyGroup | None = None
    bias: SparseBias | None = None
    banned: BannedTokens | None = None
    logprobs: LogprobGroup | None = None

    @cached_property
    def kinds(self) -> Tensor:
        """The `Draw` of each row, int8 [S]; where the device is the CPU."""
        kinds = torch.empty(sum(group.count for group in self.draws.values()), dtype=torch.int8)
        for kind, group in self.draws.items():
            kinds[slice(None) if group.index is None else group.index] = int(kind)
        return kinds


def row_group(chosen: np.ndarray, device: torch.device) -> RowGroup | None:
    """The rows where `chosen` bool [S] is set."""
    rows = np.flatnonzero(chosen)
    if len(rows) == 0:
        return None
    if len(rows) == len(chosen):
        return RowGroup(None, len(rows))
    return RowGroup(to_device(rows, device), len(rows))
