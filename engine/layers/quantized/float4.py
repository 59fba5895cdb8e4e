"""float4 (e2m1) in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.quantized.matrices import Float4Matrix
from engine.layers.grouped import Grouped
from engine.layers.quantized.base import Box, MatrixReader, inner, look_up, nibbles, outer

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CENTER = 12
"""Twice the largest value: twice the values are whole numbers around it."""
_BITS = 5


class Float4Reader(MatrixReader[Float4Matrix]):
    """See `Float4Matrix`."""

    def dequantized(self, box: Box) -> Tensor:
        *lead, rows, columns = box
        if self.matrix.is_transposed:
            rows, columns = columns, rows
        blocks = outer(columns, self.matrix.block)
        numbers, scales = self._read((*lead, rows), blocks)
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=numbers.device)
        found = look_up(values, numbers) * scales.unsqueeze(-1)
        found = found.flatten(-2)[..., inner(columns, blocks, self.matrix.block)]
        return found.transpose(-1, -2).contiguous() if self.matrix.is_transposed else found

    def grouped(self, rows: range, columns: range) -> Grouped | None:
        """In steps of half a scale, which is exact."""
        matrix = self.matrix
        if len(matrix.shape) != 2 or matrix.is_transposed:
            return None
        return self._grouped((rows,), columns)

    def grouped_of(self, number: int, rows: range, columns: range) -> Grouped | None:
        if len(self.matrix.shape) != 3:
            return None
        return self._grouped((range(number, number + 1), rows), columns)

    def _grouped(self, rows: Box, columns: range) -> Grouped | None:
        block = self.matrix.block
        if columns.start % block or columns.stop % block:
            return None
        numbers, scales = self._read(rows, outer(columns, block))
        steps = [int(2 * value) for value in _VALUES]
        places = [_CENTER + step for step in steps] + [_CENTER - step for step in steps]
        table = torch.tensor(places, dtype=torch.uint8, device=numbers.device)
        return Grouped(
            look_up(table, numbers.flatten(0, -3).flatten(1)),
            _BITS,
            _CENTER,
            block,
            (scales / 2).flatten(0, -2).contiguous(),
        )

    def _read(self, rows: Box, blocks: range) -> tuple[Tensor, Tensor]:
        """Numbers uint8 [..., rows, blocks, block] and scales float32 [..., rows, blocks]."""
        matrix = self.matrix
        if matrix.is_blocked:
            packed = self.files.box(matrix.numbers, (*rows, blocks, range(matrix.block // 2)))
        else:
            half = matrix.block // 2
            columns = range(blocks.start * half, blocks.stop * half)
            packed = self.files.box(matrix.numbers, (*rows, columns))
            packed = packed.view(*packed.shape[:-1], -1, half)
        scales = self.files.box(matrix.scales, (*rows, blocks))
        if matrix.has_exponents:
            exponents = scales.view(torch.uint8).int() - 127
            found = torch.ldexp(torch.ones(exponents.shape, device=scales.device), exponents)
        else:
            found = scales.float()
        if matrix.over is not None:
            over = self.files.box(matrix.over).float().view(())
            found = found / over if matrix.divides else found * over
        return nibbles(packed), found
