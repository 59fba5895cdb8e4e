"""`GpuKernel`: quantized matrices of one input on a GPU, multiplied as they are."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.gpu_tile import TILES, places_for, tile_for
from engine.layers.gpu_weight import GpuWeight, merge
from engine.layers.linear_kernel import LinearKernel

FUSED_ROWS = 128
"""Rows up to which codes are multiplied. Of more, the matrix becomes plain for the product: for 256
rows that takes two thirds of the time (docs/gpu.md, "Measured")."""
PLAIN_NUMBERS = 1 << 26
"""Of plain matrices at once."""


class GpuKernel(LinearKernel):
    """Matrices of whole or float numbers of 4 or 8 bits (`engine/layers/triton_kernels.py`), one
    below the other, for inputs of float16 or bfloat16.

    Inputs aren't rounded. A product of up to `FUSED_ROWS` rows is one launch for all matrices of
    the same form; a row's result depends on its number of rows only in which of `TILES` it takes.
    With more rows the result is that of the dequantized matrix. Nothing waits for the device. Calls
    must follow each other on one stream.
    """

    def __init__(self, weights: Sequence[GpuWeight], bias: Tensor | None) -> None:
        """`weights` and `bias` [out] are on the device, and the bias has the inputs' type."""
        self._kernels: Any = import_module("engine.layers.triton_kernels")
        self.weights = merge(weights)
        self.out_size = sum(weight.shape[0] for weight in self.weights)
        self.bias = bias
        self._arrived = [places_for(weight, FUSED_ROWS) for weight in self.weights]

    @property
    def num_bytes(self) -> int:
        """What the matrices take of memory."""
        return sum(weight.num_bytes for weight in self.weights)

    def compile(self, dtype: torch.dtype) -> None:
        """Compile what inputs of `dtype` need, so that no request waits for it."""
        weight = self.weights[0]
        x = torch.zeros((FUSED_ROWS + 1, weight.inputs), dtype=dtype, device=weight.words.device)
        for num_rows in (*(tile.rows for tile in TILES), len(x)):
            self(x[:num_rows])

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        if len(x) > FUSED_ROWS:
            return self._plain_product(x)
        out = torch.empty((len(x), self.out_size), dtype=x.dtype, device=x.device)
        if not len(x):
            return out
        tile, start = tile_for(len(x)), 0
        for weight, arrived in zip(self.weights, self._arrived, strict=True):
            here = slice(start, start + weight.shape[0])
            bias = None if self.bias is None else self.bias[here]
            splits = tile.splits(weight)
            self._kernels.multiply(x, weight, bias, out[:, here], arrived, tile, splits)
            start = here.stop
        return out

    def _plain_product(self, x: Tensor) -> Tensor:
        """The same by plain matrices, which are there for their product only."""
        inputs = x.shape[1]
        if self.out_size * inputs <= PLAIN_NUMBERS:
            return F.linear(x, self.dequantize(x.dtype), self.bias)
        out = torch.empty((len(x), self.out_size), dtype=x.dtype, device=x.device)
        start, step = 0, max(1, PLAIN_NUMBERS // inputs)
        for weight in self.weights:
            for begin in range(0, weight.shape[0], step):
                count = min(step, weight.shape[0] - begin)
                plain = torch.empty((count, inputs), dtype=x.dtype, device=x.device)
                self._kernels.decode(weight, plain, begin=begin)
                torch.mm(x, plain.t(), out=out[:, start : start + count])
                start += count
        return out if self.bias is None else out.add_(self.bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in] of `dtype`, float16 or bfloat16: computed in float32, rounded once."""
        device = self.weights[0].words.device
        plain = torch.empty((self.out_size, self.weights[0].inputs), dtype=dtype, device=device)
        start = 0
        for weight in self.weights:
            self._kernels.decode(weight, plain[start : start + weight.shape[0]])
            start += weight.shape[0]
        return plain

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the first matrix, of `dtype`, float16 or bfloat16: int64 [T] -> [T, in]. A row
        that it doesn't have is NaN."""
        weight = self.weights[0]
        out = torch.empty((len(ids), weight.inputs), dtype=dtype, device=ids.device)
        if len(ids):
            self._kernels.decode(weight, out, ids=ids)
        return out
