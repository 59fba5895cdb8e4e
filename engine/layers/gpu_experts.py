"""`GpuExperts`: a mixture's quantized matrices on a GPU, multiplied as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.layers.float8_groups import Quantized
from engine.layers.gpu_tile import TILES, Tile, places_for, tile_for
from engine.layers.gpu_weight import GpuWeight, merge, pack, stack

SPLIT_ROWS = 1024
"""Of more rows, inputs aren't divided among programs: there are enough of them."""


class GpuExperts:
    """One matrix for each expert, all of one shape, for inputs of float16 or bfloat16 that are
    sorted by expert: one launch for all, whichever have rows.

    Inputs aren't rounded. A row's result depends on the number of all rows only in which of `TILES`
    it takes, and whether there are more than `SPLIT_ROWS`. Nothing waits for the device. Calls must
    follow each other on one stream.
    """

    def __init__(self, weight: GpuWeight, bias: Tensor | None) -> None:
        """`bias`, of the inputs' type: [experts, out]."""
        self._kernels: Any = import_module("engine.layers.triton_kernels")
        self.weight = weight
        self.bias = None if bias is None else bias.contiguous()
        self._arrived = places_for(weight, SPLIT_ROWS)

    @classmethod
    def of(
        cls, parts: Iterable[Sequence[Quantized] | None], bias: Tensor | None
    ) -> GpuExperts | None:
        """Of each expert's matrices that `can_pack`, one below the other; None: they can't be one
        weight, or there is a None among `parts`."""
        weights = []
        for own in parts:
            merged = [] if own is None else merge([pack(part) for part in own])
            if len(merged) != 1:
                return None
            weights += merged
        weight = stack(weights)
        return None if weight is None else cls(weight, bias)

    def __len__(self) -> int:
        return self.weight.matrices

    @property
    def num_bytes(self) -> int:
        """What the matrices take of memory."""
        return self.weight.num_bytes

    def compile(self, dtype: torch.dtype) -> None:
        """Compile what inputs of `dtype` need, so that no request waits for it."""
        device = self.weight.words.device
        x = torch.zeros((1, self.weight.inputs), dtype=dtype, device=device)
        nowhere = torch.zeros(len(self), dtype=torch.int32, device=device)
        for tile in TILES:
            for splits in {1, tile.splits(self.weight)}:
                self._product(x, nowhere, tile, splits)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [R, in], of which an expert's rows end at its number in `ends`, int32 [experts], where
        the next one's begin -> [R, out]. Rows behind the last end stay as they are allocated."""
        tile = tile_for(-(-len(x) // len(self)))
        return self._product(x, ends, tile, tile.splits(self.weight) if len(x) <= SPLIT_ROWS else 1)

    def _product(self, x: Tensor, ends: Tensor, tile: Tile, splits: int) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = torch.empty((len(x), self.weight.shape[0]), dtype=x.dtype, device=x.device)
        if len(x):
            self._kernels.multiply(
                x, self.weight, self.bias, out, self._arrived, tile, splits, ends
            )
        return out
