"""Sampling by our own kernels on CPU (`engine/csrc/sampling.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.native.library import require_kernels
from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.features.draw import DrawPlan, DrawTable
from engine.sampling.features.logprobs import LogprobTensors


class CpuSampling(SamplingBackend):
    """One call draws all lines of a step, another finds their log-probabilities.

    A line's result is the same to the bit in any batch and with any number of threads.
    """

    def __init__(self, table: DrawTable) -> None:
        """Raises `ConfigError` if the library of kernels is not there."""
        super().__init__(table)
        self._kernels: Any = require_kernels("sampling_backend")

    def sample(self, logits: Tensor, plan: DrawPlan, rows: Tensor, positions: Tensor) -> Drawn:
        tables = self.table.floats, self.table.ints
        return Drawn(*self._kernels.sample(logits, plan.kinds, rows, positions, *tables))

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobTensors:
        count = min(max(num_top, default=0), self.table.vocab_size)
        token, top_ids, top = self._kernels.logprobs(logits.contiguous(), token_ids, count)
        return LogprobTensors(token, top_ids, top, num_top)
