"""Sampling for CUDA by kernels of our own in Triton (`engine/sampling/triton_kernels.py`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.device.triton_loader import require_triton
from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.features.draw import DrawPlan, DrawTable
from engine.sampling.scratch import Scratch

MAX_SPLITS = 128
PROGRAMS_PER_MULTIPROCESSOR = 4
BLOCK = 2048
"""Logits that a program reads at once."""
WARPS = 8
SETTLE_WARPS = 16
"""One program of it has a row to itself, and with fewer warps too few registers."""
MIN_CHUNK = 16
MAX_CHUNKS = 8192
HELD = 4096
"""Tokens of the chunks that are read again."""


class ChunkSizes(NamedTuple):
    """How the kernels cut a vocabulary into chunks."""

    chunk: int
    """Tokens of each."""
    chunks: int
    """Their number, rounded up to a power of two."""
    picked: int
    """Chunks whose tokens one program holds at once."""


def chunk_sizes(vocab_size: int) -> ChunkSizes:
    """The sizes for a vocabulary: one program holds the largest logits of all chunks, too."""
    chunk = MIN_CHUNK
    while vocab_size > chunk * MAX_CHUNKS:
        chunk *= 2
    num_chunks = -(-vocab_size // chunk)
    return ChunkSizes(chunk, max(MIN_CHUNK, 1 << (num_chunks - 1).bit_length()), HELD // chunk)


class TritonSampling(SamplingBackend):
    """Three launches draw all lines of a step, whatever they ask for.

    The first finds the lines' largest logits, the second lets the noise choose among all tokens,
    the third has the last word under top_k and top_p. A few programs share the logits of each line,
    so that a small batch keeps the device busy too. What is launched depends on the batch's size
    alone.
    """

    ignores_plan = True
    takes_half = True

    def __init__(self, table: DrawTable) -> None:
        """Raises `ConfigError` if Triton is missing."""
        super().__init__(table)
        require_triton()
        self._kernels: Any = import_module("engine.sampling.triton_kernels")
        self._scratch = Scratch(table.device)
        self.sizes = chunk_sizes(table.vocab_size)
        self._programs = PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(table.device)

    def sample(self, logits: Tensor, plan: DrawPlan, rows: Tensor, positions: Tensor) -> Drawn:
        """`logits` may be of a half type here: [S, vocab], contiguous."""
        lines, vocab = logits.shape
        drawn = Drawn(torch.empty_like(rows), logits.new_empty(lines, dtype=torch.float32))
        if lines == 0:
            return drawn
        blocks, splits = self._split(lines)
        take, kernels, sizes = self._scratch.get, self._kernels, self.sizes
        peaks, races = take("places", (2, lines, MAX_SPLITS), torch.int64)
        masses = take("masses", (lines, MAX_SPLITS), torch.float64)
        tops = take("tops", (lines, -(-vocab // sizes.chunk)), torch.float32)
        picked = take("picked", (lines, sizes.picked), torch.int32)
        tables = self.table.floats, self.table.ints, rows
        common = dict(VOCAB=vocab, SPLITS=MAX_SPLITS, BLOCK=BLOCK)
        kernels.find_peaks[lines, splits](
            peaks, tops, logits, *tables, blocks, **common, CHUNK=sizes.chunk, num_warps=WARPS
        )
        kernels.run_races[lines, splits](
            races,
            masses,
            logits,
            peaks,
            *tables,
            positions,
            blocks,
            splits,
            **common,
            PICKED=sizes.picked,
            num_warps=WARPS,
        )
        kernels.settle[(lines,)](
            *drawn,
            picked,
            logits,
            peaks,
            tops,
            races,
            masses,
            *tables,
            positions,
            splits,
            **common,
            CHUNK=sizes.chunk,
            CHUNKS=sizes.chunks,
            PICKED=sizes.picked,
            num_warps=SETTLE_WARPS,
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
