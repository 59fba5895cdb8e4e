"""`SlottedAdapters`: adapters of a GPU, in memory that is taken before the KV cache is.

A step of few rows computes each row from the matrices in its slot. The slots are read on the
device, so that a captured graph serves any adapters (BGMV, Punica). Many rows go adapter by
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.adapter_rows import AdapterRows
from engine.device.pinned import to_device
from engine.layers.adapted import Factors, TorchAdapters

MAX_BY_ROW = 64
"""Rows of a step that are computed one by one where no graph was captured. More are fewer, larger
products adapter by adapter."""
ROWS_AT_ONCE = 8
"""Of torch's operators, which copy the matrices of each."""
RANK_BLOCK = 16
"""Slots have room for a multiple of this rank."""


class SlotMatrices(NamedTuple):
    """What all slots hold, of P projections of one input. B is scaled."""

    a: Tensor
    """[slots, P, R, in]"""
    b: tuple[Tensor, ...]
    """By projection [slots, R, out]."""
    ranks: Tensor
    """int32 [slots, P]: rows of A and B that count; 0 where an adapter changes nothing."""


class SlottedAdapters(TorchAdapters):
    """Matrices of up to a highest rank, copied into slots behind the steps launched before."""

    def __init__(
        self,
        in_size: int,
        sizes: Sequence[int],
        num_slots: int,
        max_rank: int,
        like: Tensor,
        *,
        by_triton: bool,
    ) -> None:
        """Of the type and on the device of `like`. `by_triton`: rows are computed by our kernels,
        else by torch's operators."""
        super().__init__(in_size, sizes, num_slots)
        rank = -(-max_rank // RANK_BLOCK) * RANK_BLOCK
        self._slots = SlotMatrices(
            like.new_zeros((num_slots, len(sizes), rank, in_size)),
            tuple(like.new_zeros((num_slots, rank, size)) for size in sizes),
            torch.zeros((num_slots, len(sizes)), dtype=torch.int32, device=like.device),
        )
        self._kernels: Any = None
        if by_triton:
            self._kernels = import_module("engine.layers.triton_adapters")

    def set(self, slot: int, parts: Sequence[Factors | None]) -> None:
        ranks = np.array([0 if part is None else len(part[0]) for part in parts], np.int32)
        placed: list[Factors | None] = [None] * len(parts)
        for at, (part, rank) in enumerate(zip(parts, ranks, strict=True)):
            if part is not None:
                mine = self._slots.a[slot, at, :rank], self._slots.b[at][slot, :rank]
                for here, given in zip(mine, part, strict=True):
                    here.copy_(given, non_blocking=True)
                placed[at] = mine
        super().set(slot, placed)
        own = self._slots.ranks[slot]
        own.copy_(to_device(ranks, own.device))

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        if not rows.is_captured and len(x) > MAX_BY_ROW:
            super().add(y, x, rows)
        elif self._kernels is not None:
            self._kernels.add_rows(y, x, rows.slots, self._slots)
        else:
            add_rows(y, x, rows.slots, self._slots)


def add_rows(y: Tensor, x: Tensor, slots: Tensor, matrices: SlotMatrices) -> None:
    """Add to y [N, out], in place, what the adapters in `slots` int32 [N], -1 for none, make of
    x [N, in]."""
    for first in range(0, len(x), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        _add_rows(y[part], x[part], slots[part], matrices)


def _add_rows(y: Tensor, x: Tensor, slots: Tensor, matrices: SlotMatrices) -> None:
    """It copies the matrices of every row."""
    at = slots.clamp_min(0).long()
    a, start = matrices.a.index_select(0, at), 0
    ranks = matrices.ranks.index_select(0, at).masked_fill((slots < 0)[:, None], 0)
    counts = torch.arange(a.shape[2], dtype=torch.int32, device=x.device) < ranks[:, :, None]
    inner = torch.matmul(a, x[:, None, :, None]).squeeze(-1)
    inner = torch.where(counts, inner, torch.zeros_like(inner))
    for part, b in enumerate(matrices.b):
        more = torch.bmm(inner[:, part, None, :], b.index_select(0, at)).squeeze(1)
        y.narrow(1, start, b.shape[2]).add_(more.to(y.dtype))
        start += b.shape[2]
