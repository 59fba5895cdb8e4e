"""float8 and int8 with scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.checkpoint.quantized.matrices import ScaledMatrix
from engine.layers.float8_groups import Float8Groups
from engine.layers.grouped import Grouped
from engine.layers.quantized.base import Box, MatrixReader, outer

LEAST_GROUP = 16
"""Inputs of the smallest group of float8 numbers."""


class ScaledReader(MatrixReader[ScaledMatrix]):
    """See `ScaledMatrix`."""

    def dequantized(self, box: Box) -> Tensor:
        found = self.files.box(self.matrix.numbers, box).float()
        if self.matrix.zeros is not None:
            found -= self._by_number(self.matrix.zeros, box)
        found *= self._by_number(self.matrix.scales, box)
        return found if self.matrix.factor == 1.0 else found.mul_(self.matrix.factor)

    def grouped(self, rows: range, columns: range) -> Grouped | None:
        """Of int8 whose scales belong to outputs, or to all."""
        matrix = self.matrix
        if len(matrix.shape) != 2 or matrix.zeros or matrix.block[1] < matrix.shape[1]:
            return None
        numbers = self.files.box(matrix.numbers, (rows, columns))
        if numbers.dtype != torch.int8:
            return None
        scales = self._by_number(matrix.scales, (rows, range(1)))
        return Grouped(
            numbers=(numbers.view(torch.uint8) ^ 128).contiguous(),
            bits=8,
            center=128,
            group=len(columns),
            scales=(scales.expand(len(rows), 1) * matrix.factor).contiguous(),
        )

    def float8(self, rows: range, columns: range) -> Float8Groups | None:
        """A part that cuts through blocks has them halved, down to `LEAST_GROUP` inputs."""
        matrix, block = self.matrix, self.matrix.block[-1]
        if len(matrix.shape) != 2 or matrix.zeros:
            return None
        group = len(columns)
        if len(outer(columns, block)) > 1:
            group = math.gcd(block, columns.start, len(columns))
            if group < min(block, LEAST_GROUP):
                return None
        numbers = self.files.box(matrix.numbers, (rows, columns))
        if numbers.dtype != torch.float8_e4m3fn:
            return None
        scales = self._by_number(matrix.scales, (rows, columns))
        places = slice(None, None, group) if scales.shape[1] > 1 else slice(None)
        scales = scales[:, places].expand(len(rows), -1) * matrix.factor
        return Float8Groups(numbers.contiguous(), group, scales.contiguous())

    def _by_number(self, name: str, box: Box) -> Tensor:
        """float32: the scales or zeros of `box`, along each dimension one or one for each place."""
        stored = self.files.box(name).float().view(self.matrix.scales_shape)
        for dim, (part, block) in enumerate(zip(box, self.matrix.block, strict=True)):
            blocks = outer(part, block)
            stored = stored.narrow(dim, blocks.start, len(blocks))
            if len(blocks) > 1 and block > 1:
                places = torch.arange(part.start, part.stop, device=stored.device) // block
                stored = stored.index_select(dim, places - blocks.start)
        return stored
