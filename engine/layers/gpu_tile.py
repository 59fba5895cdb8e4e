"""`Tile`: what a program of the product with quantized matrices computes (`triton_kernels`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.layers.gpu_weight import GpuWeight

PROGRAMS = 1024
"""Programs that keep a GPU's memory busy: inputs aren't split for more."""
EXPERTS = 4
"""Of a mixture, have tokens at least, for the same purpose."""
LEAST_CHUNKS = 4
"""Chunks of the inputs that a part has at least for every 16 rows: its sums go through memory."""


class Tile(NamedTuple):
    """Its size, and how it is computed."""

    rows: int
    outputs: int
    warps: int
    stages: int
    """Chunks of the inputs that are on their way at once."""

    def blocks(self, num_rows: int, matrices: int) -> int:
        """Of rows, at most, when `num_rows` are divided among matrices."""
        if matrices == 1:
            return -(-num_rows // self.rows)
        return min(num_rows, matrices) + num_rows // self.rows

    def splits(self, weight: GpuWeight) -> int:
        """Parts that inputs are divided into, a power of two that depends on the matrix alone."""
        programs, chunks = -(-weight.shape[0] // self.outputs), weight.chunks
        programs *= min(weight.matrices, EXPERTS)
        found, least = 1, LEAST_CHUNKS * -(-self.rows // 16)
        while 2 * found * programs <= PROGRAMS and chunks // (2 * found) >= least:
            found *= 2
        return found


TILES = (Tile(16, 64, 2, 4), Tile(32, 64, 4, 4), Tile(64, 128, 8, 4))
"""For up to so many rows; the last one for more, too."""


def places_for(weight: GpuWeight, num_rows: int) -> Tensor:
    """Zeros for all blocks of outputs and rows of a product of up to `num_rows`: `arrived` of
    `triton_kernels.multiply`."""
    counts = [
        -(-weight.shape[0] // tile.outputs) * tile.blocks(num_rows, weight.matrices)
        for tile in TILES
    ]
    return torch.zeros(max(counts), dtype=torch.int32, device=weight.words.device)


def tile_for(num_rows: int) -> Tile:
    """The tile of a product of so many rows."""
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])
