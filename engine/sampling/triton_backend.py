"""Sampling for CUDA by kernels of our own in Triton (`engine/sampling/triton_kernels.py`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.device.triton_loader import require_triton
from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.features.draw import DrawPlan, DrawTable
from engine.sampling.scratch import Scratch

MAX_SPLITS = 128
PROGRAMS_PER_MULTIPROCESSOR = 4
BLOCK = 2048
WARPS = 8


class TritonSampling(SamplingBackend):
    """Three launches draw all lines of a step, whatever they ask for.

    The first finds the lines' largest logits, the second lets the noise choose among all tokens,
    the third has the last word under top_k and top_p. A few programs share the logits of each line,
    so that a small batch keeps the device busy too. What is launched depends on the batch's size
    alone.
    """

    ignores_plan = True

    def __init__(self, table: DrawTable) -> None:
        """Raises `ConfigError` if Triton is missing."""
        super().__init__(table)
        require_triton()
        self._kernels: Any = import_module("engine.sampling.triton_kernels")
        self._scratch = Scratch(table.device)
        self._programs = PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(table.device)

    def sample(self, logits: Tensor, plan: DrawPlan, rows: Tensor, positions: Tensor) -> Drawn:
        """`logits` may be of a half type here: [S, vocab], contiguous."""
        count, vocab = logits.shape
        drawn = Drawn(torch.empty_like(rows), logits.new_empty(count, dtype=torch.float32))
        if count == 0:
            return drawn
        blocks, splits = self._split(count)
        peaks, races = self._scratch.get("places", (2, count, MAX_SPLITS), torch.int64)
        masses = self._scratch.get("masses", (count, MAX_SPLITS), torch.float64)
        tables = self.table.floats, self.table.ints
        sizes = dict(VOCAB=vocab, SPLITS=MAX_SPLITS, BLOCK=BLOCK, num_warps=WARPS)
        kernels = self._kernels
        kernels.find_peaks[count, splits](peaks, logits, blocks, **sizes)
        kernels.run_races[count, splits](
            races, masses, logits, peaks, *tables, rows, positions, blocks, splits, **sizes
        )
        kernels.settle[(count,)](
            *drawn, logits, peaks, races, masses, *tables, rows, positions, splits, **sizes
        )
        return drawn

    def _split(self, lines: int) -> tuple[int, int]:
        """Blocks of logits for each program, and programs for each of `lines`."""
        total = -(-self.table.vocab_size // BLOCK)
        splits = min(max(1, self._programs // lines), total, MAX_SPLITS)
        blocks = -(-total // splits)
        return blocks, -(-total // blocks)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
