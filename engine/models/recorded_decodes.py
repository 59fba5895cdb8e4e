"""Decodes on CPU whose layers run as one call: the kernels' calls, recorded once per batch size.

A layer is some ten calls of our kernels, and Python needs longer for a call than a kernel for a few
rows of a small model. What is recorded works on the same memory each time, as a CUDA graph does. A
layer that also uses torch's operators isn't recorded, and runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.forward_batch import ForwardBatch
from engine.device.distributed import ParallelState
from engine.layers.adapted import MAX_RECORDED
from engine.layers.fused_ops import CpuOps, FusedOps

logger = logging.getLogger(__name__)

MAX_ROWS = MAX_RECORDED
"""Of a batch that is recorded. With more rows the kernels take so long that nothing is gained."""

RunLayers = Callable[[Tensor, ForwardBatch, AttentionBackend], tuple[Tensor, Tensor | None]]
"""(hidden [T, size], step, backend) -> output and residual of the last layer, which aren't added
yet. There is at least one layer."""


@dataclass(frozen=True)
class _Recorded:
    """The layers for one batch size, and the memory that they work on."""

    calls: Any
    """`Recording` of engine/csrc/recording.h."""
    batch: ForwardBatch
    hidden: Tensor
    """[rows, size]: the layers' input, which becomes `residual`."""
    output: Tensor
    residual: Tensor

    def fill(self, hidden: Tensor, batch: ForwardBatch, backend: AttentionBackend) -> None:
        """Take the input of another step of as many rows."""
        self.hidden.copy_(hidden)
        mine = self.batch
        mine.positions.copy_(batch.positions)
        mine.out_cache_loc.copy_(batch.out_cache_loc)
        mine.req_pool_indices_cpu[:] = batch.req_pool_indices_cpu
        mine.seq_lens_cpu[:] = batch.seq_lens_cpu
        if mine.window_loc is not None:
            mine.window_loc.copy_(backend.inputs.pool.window_slots(mine.out_cache_loc))


class RecordedDecodes:
    """The layers of one model's stage."""

    @classmethod
    def of(
        cls, run: RunLayers, kernels: FusedOps | None, parallel: ParallelState
    ) -> RecordedDecodes | None:
        """None: `run` doesn't compute with our kernels on CPU, or waits for other ranks."""
        if not isinstance(kernels, CpuOps) or parallel.tp_size > 1:
            return None
        return cls(run, kernels)

    def __init__(self, run: RunLayers, kernels: CpuOps) -> None:
        """`kernels`: those that `run` computes with."""
        self._run = run
        self._kernels = kernels
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        """By batch size, and whether lines have adapters."""
        self._backend: AttentionBackend | None = None
        self.lack = ""
        """Why nothing is recorded; "" if nothing is in the way."""

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that were recorded, ascending."""
        return sorted({size for size, _ in self._recorded})

    def __call__(
        self, hidden: Tensor, batch: ForwardBatch, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor] | None:
        """What the layers make of `hidden` [T, size], as `RunLayers` has it: a new tensor, and one
        that the next call overwrites. None: they must be run.

        `backend.init_forward` must have been called for `batch`.
        """
        size = batch.batch_size
        only_decodes = batch.num_tokens == size and batch.num_long == 0
        if self.lack or not backend.can_be_recorded or not only_decodes or not 0 < size <= MAX_ROWS:
            return None
        if batch.adapters is not None and batch.adapters.changes_experts:
            return None  # which experts are called depends on the tokens
        if backend is not self._backend:  # another KV cache
            self._recorded.clear()
            self._backend = backend
        recorded = self._recorded.get((size, batch.adapters is not None))
        if recorded is None:
            return self._record(hidden, batch, backend)
        recorded.fill(hidden, batch, backend)
        recorded.calls.replay()
        return recorded.output.clone(), recorded.residual

    def _record(
        self, hidden: Tensor, batch: ForwardBatch, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Run the layers for this step, and keep what they call."""
        own = replace(
            batch,
            positions=batch.positions.clone(),
            out_cache_loc=batch.out_cache_loc.clone(),
            req_pool_indices_cpu=batch.req_pool_indices_cpu.copy(),
            seq_lens_cpu=batch.seq_lens_cpu.copy(),
            token_starts_cpu=np.arange(batch.batch_size + 1),
            window_loc=None,
        )
        if backend.inputs.window_table is not None:
            own.window_loc = backend.inputs.pool.window_slots(own.out_cache_loc)
        hidden = hidden.clone()
        calls = self._kernels.new_recording()
        backend.init_forward(own)
        calls.begin()
        try:
            output, residual = self._run(hidden, own, backend)
        finally:
            calls.end()
        assert residual is not None
        if calls.others:
            self.lack = f"the layers use {', '.join(sorted(calls.others))}"
            logger.debug("decodes are not recorded: %s", self.lack)
        else:
            recorded = _Recorded(calls, own, hidden, output, residual)
            self._recorded[batch.batch_size, batch.adapters is not None] = recorded
        return output.clone(), residual
