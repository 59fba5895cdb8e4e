"""Memory that captured decodes read and write, at addresses that never change."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.forward_batch import StepInputs
from engine.device.queue import DeviceQueue
from engine.device.staging import Part, pack
from engine.protocol.step import IntArray
from engine.worker.model_runner import ModelRunner, TableUpdate


class GraphInputs(NamedTuple):
    """What graphs of one size read."""

    step: StepInputs[Tensor]
    cells: Tensor
    locs: Tensor
    """`cells` and `locs` are a `TableUpdate`."""
    adapters: Tensor | None = None
    """int32 [size]: slots of the rows' adapters; None where requests have none."""


class GraphOutputs(NamedTuple):
    """What graphs of one size write; a field is None on stages that don't have it."""

    hidden_in: Tensor | None
    """[size, hidden]: from the previous stage. It isn't an output, but is stored here too."""
    hidden_out: Tensor | None
    """[size, hidden]: for the next stage."""
    logits: Tensor | None
    """[size, vocab], of the type that the sampler takes."""
    token_ids: Tensor | None
    """int64 [size]"""
    is_nan: Tensor | None
    """bool [size]"""

    def front(self, size: int) -> GraphOutputs:
        """The first `size` rows of each."""
        return GraphOutputs(*(None if whole is None else whole[:size] for whole in self))


class GraphBuffers:
    """Inputs and outputs for up to `max_size` rows; graphs of fewer use the front of each."""

    def __init__(self, runner: ModelRunner, max_size: int, logits_dtype: torch.dtype) -> None:
        self.max_size = max_size
        self._queue: DeviceQueue = runner.queue
        # A decode has one token per row, so every array has one element per row of the batch.
        kinds = [torch.int64] * 7 + [torch.int32]  # StepInputs
        kinds += [torch.int64, torch.int32]  # TableUpdate
        if runner.adapted is not None:
            kinds.append(torch.int32)
        self._offsets, total = pack([max_size * kind.itemsize for kind in kinds])
        device = runner.device
        self._memory = torch.zeros(total, dtype=torch.uint8, device=device)
        self._inputs = [
            self._memory[offset : offset + max_size * kind.itemsize].view(kind)
            for offset, kind in zip(self._offsets, kinds, strict=True)
        ]
        config, parallel = runner.config.model, runner.parallel
        hidden = (max_size, config.hidden_size)
        last = parallel.is_last_stage
        self._outputs = GraphOutputs(
            None
            if parallel.is_first_stage
            else torch.zeros(hidden, dtype=runner.dtype, device=device),
            None if last else torch.zeros(hidden, dtype=runner.dtype, device=device),
            torch.zeros((max_size, config.vocab_size), dtype=logits_dtype, device=device)
            if last
            else None,
            torch.zeros(max_size, dtype=torch.int64, device=device) if last else None,
            torch.zeros(max_size, dtype=torch.bool, device=device) if last else None,
        )

    def inputs(self, size: int) -> GraphInputs:
        """What graphs of `size` rows read, [size] each."""
        parts = [whole[:size] for whole in self._inputs]
        num_inputs = len(StepInputs._fields)
        return GraphInputs(StepInputs(*parts[:num_inputs]), *parts[num_inputs:])

    def outputs(self, size: int) -> GraphOutputs:
        """What graphs of `size` rows write, [size] each."""
        return self._outputs.front(size)

    def write(
        self, inputs: StepInputs[np.ndarray], update: TableUpdate, adapters: IntArray | None
    ) -> None:
        """Copy a step's inputs by one transfer to the memory that graphs read. `adapters` int32
        [size]: the slots of the rows' adapters; None: the step reads none."""
        pieces: list[np.ndarray] = [*inputs, *update]
        if adapters is not None:
            pieces.append(adapters)
        offsets = self._offsets[: len(pieces)]
        self._queue.fill([Part(*pair) for pair in zip(offsets, pieces, strict=True)], self._memory)
