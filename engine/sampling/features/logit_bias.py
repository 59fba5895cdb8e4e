"""`LogitBias`: what a request adds to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.step import Int64Array, RowParams
from engine.sampling.features.base import Adjustment, SampledLines


class SparseBias(NamedTuple):
    """`values` float32 [N] to add at `cells` int64 [N] of the flattened logits."""

    cells: Tensor
    values: Tensor


class LogitBias(Adjustment):
    """`SamplingParams.logit_bias`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def install(self, items: Sequence[RowParams]) -> None:
        for item in items:
            self._bias.pop(item.row, None)
            if item.params.logit_bias:
                ids = np.fromiter(item.params.logit_bias.keys(), dtype=np.int64)
                values = np.fromiter(item.params.logit_bias.values(), dtype=np.float32)
                self._bias[item.row] = (ids, values)

    def plan(self, rows: Int64Array) -> SparseBias | None:
        found = [
            (line * self.vocab_size + self._bias[row][0], self._bias[row][1])
            for line, row in enumerate(rows.tolist())
            if row in self._bias
        ]
        if not found:
            return None
        cells = np.concatenate([ids for ids, _ in found])
        values = np.concatenate([biases for _, biases in found])
        return SparseBias(to_device(cells, self.device), to_device(values, self.device))

    def apply(self, plan: SparseBias, logits: Tensor, lines: SampledLines) -> None:
        logits.view(-1).scatter_add_(0, plan.cells, plan.values)
