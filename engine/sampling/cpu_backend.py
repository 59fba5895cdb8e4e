"""Sampling by our own kernels on CPU (`engine/csrc/sampling.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.native.library import require_kernels
from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.plan import SamplingPlan
from engine.sampling.state import SamplingState


class CpuSampling(SamplingBackend):
    """One call draws all rows of a step, another finds their log-probabilities.

    A row's result is the same to the bit in any batch and with any number of threads.
    """

    def __init__(self, state: SamplingState) -> None:
        """Raises `ConfigError` if the library of kernels is not there."""
        super().__init__(state)
        self._kernels: Any = require_kernels("sampling_backend")

    def sample(self, logits: Tensor, plan: SamplingPlan, slots: Tensor, positions: Tensor) -> Drawn:
        return Drawn(
            *self._kernels.sample(logits, plan.kinds, slots, positions, *self.state.tables())
        )

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobTensors:
        count = min(max(num_top, default=0), self.state.vocab_size)
        token, top_ids, top = self._kernels.logprobs(logits.contiguous(), token_ids, count)
        return LogprobTensors(token, top_ids, top, num_top)
