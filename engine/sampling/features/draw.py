"""How a token is drawn: temperature, top_k, top_p, min_p, and the seed of the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import Int64Array, RowParams
from engine.sampling.features.base import SamplingFeature
from engine.sampling.hash_noise import mix_seed
from engine.sampling.line_group import LineGroup, line_group

# vLLM's limit: below it logits / temperature leaves float32's range.
MIN_TEMPERATURE = 1e-5
_NO_TOP_P = 2.0
COSTLIEST = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, min_p=0.01, seed=0)
"""What takes most memory to draw: a sort of the whole vocabulary, for every line."""


class Draw(IntEnum):
    """How a row's token is chosen."""

    GREEDY = 0
    """The likeliest token."""
    FULL = 1
    """Any token of the vocabulary (that passes min_p)."""
    NUCLEUS = 2
    """top_p without top_k."""
    TOP_K = 3
    """top_k, perhaps with top_p."""


class DrawParams(NamedTuple):
    """Parameters of a batch's lines, each [S, 1] on the device."""

    inverse_temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor


@dataclass(frozen=True)
class DrawPlan:
    """Groups of lines by the way to draw; every line is in one.

    The order is: temperature, then min_p, top_k and top_p (on what the others left), then the draw.
    """

    groups: dict[Draw, LineGroup]
    uses_min_p: bool = False
    max_top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        """All lines take the likeliest token."""
        return self.groups.keys() == {Draw.GREEDY}

    @property
    def is_plain(self) -> bool:
        """Lines take the likeliest token, or draw from the whole vocabulary."""
        return not self.uses_min_p and self.groups.keys() <= {Draw.GREEDY, Draw.FULL}

    @cached_property
    def kinds(self) -> Tensor:
        """The `Draw` of each line, int8 [S]; where the device is the CPU."""
        kinds = torch.empty(sum(group.count for group in self.groups.values()), dtype=torch.int8)
        for kind, group in self.groups.items():
            kinds[slice(None) if group.index is None else group.index] = int(kind)
        return kinds


class DrawTable(SamplingFeature):
    """Draw parameters by row, as tensors on the device. The host knows what each row uses.

    A row that was never installed is greedy.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.floats = torch.zeros((max_rows, 3), dtype=torch.float32, device=device)
        """Columns: 1/temperature, top_p, min_p. engine/csrc/sampling.h reads both tables, too."""
        self.ints = torch.zeros((max_rows, 2), dtype=torch.int64, device=device)
        """Columns: hashed seed, top_k (1: greedy)."""
        self._draw = np.zeros(max_rows, dtype=np.int8)
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._min_p = np.zeros(max_rows, dtype=np.bool_)

    def check(self, item: RowParams) -> None:
        if item.params.seed is None and item.params.temperature >= MIN_TEMPERATURE:
            raise ValueError(f"row {item.row} samples without a seed")

    def install(self, items: Sequence[RowParams]) -> None:
        draws = [self._draw_of(item.params) for item in items]
        floats = np.array([_floats(item.params) for item in items], dtype=np.float32)
        ints = np.array(
            [_ints(item.params, draw) for item, draw in zip(items, draws, strict=True)], np.int64
        )
        rows = np.array([item.row for item in items], dtype=np.int64)
        index = to_device(rows, self.device)
        self.floats.index_copy_(0, index, to_device(floats, self.device))
        self.ints.index_copy_(0, index, to_device(ints, self.device))
        self._draw[rows] = draws
        self._top_k[rows] = np.where(np.equal(draws, Draw.TOP_K), ints[:, 1], 0)
        self._min_p[rows] = floats[:, 2] > 0.0

    def plan(self, rows: Int64Array) -> DrawPlan:
        draw = self._draw[rows]
        groups = {kind: line_group(draw == kind, self.device) for kind in Draw}
        return DrawPlan(
            groups={kind: group for kind, group in groups.items() if group is not None},
            uses_min_p=bool(self._min_p[rows].any()),
            max_top_k=int(self._top_k[rows].max(initial=0)),
        )

    def params(self, rows: Tensor) -> DrawParams:
        """Parameters of the lines with `rows` int64 [S]."""
        floats = self.floats.index_select(0, rows)
        top_k = self.ints[:, 1].index_select(0, rows).unsqueeze(1)
        return DrawParams(floats[:, 0:1], floats[:, 1:2], floats[:, 2:3], top_k)

    def mixed_seeds(self, rows: Tensor) -> Tensor:
        """int64 [S], the first argument of `HashNoise.row_keys`."""
        return self.ints[:, 0].index_select(0, rows)

    def greedy(self, rows: Tensor) -> Tensor:
        """bool [S]: whether a line takes the likeliest token (rows that were installed)."""
        return self.ints[:, 1].index_select(0, rows) == 1

    def _draw_of(self, params: SamplingParams) -> Draw:
        if params.temperature < MIN_TEMPERATURE or params.top_k == 1:
            return Draw.GREEDY
        if 0 < params.top_k < self.vocab_size:
            return Draw.TOP_K
        return Draw.NUCLEUS if params.top_p < 1.0 else Draw.FULL


def _floats(params: SamplingParams) -> tuple[float, ...]:
    return (
        1.0 / max(params.temperature, MIN_TEMPERATURE),
        # 1 must not drop the tail whose mass is lost in rounding.
        params.top_p if params.top_p < 1.0 else _NO_TOP_P,
        params.min_p,
    )


def _ints(params: SamplingParams, draw: Draw) -> tuple[int, ...]:
    top_k = params.top_k if params.top_k > 0 else 2**31 - 1
    return (mix_seed(params.seed or 0), 1 if draw is Draw.GREEDY else top_k)
