"""Tables of 16 numbers (bitsandbytes)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.quantized.matrices import CodebookMatrix
from engine.layers.quantized.base import Box, MatrixReader, inner, look_up, nibbles, outer


class CodebookReader(MatrixReader[CodebookMatrix]):
    """See `CodebookMatrix`."""

    def dequantized(self, box: Box) -> Tensor:
        rows, columns = box
        width = self.matrix.shape[1]
        flat = range(rows.start * width, rows.stop * width)
        pairs = outer(flat, 2)
        packed = self.files.box(self.matrix.numbers).flatten()[pairs.start : pairs.stop]
        numbers = nibbles(packed, high_first=True)[inner(flat, pairs, 2)]
        found = look_up(self.files.box(self.matrix.codes), numbers)
        blocks = outer(flat, self.matrix.block)
        places = torch.arange(flat.start, flat.stop, device=found.device) // self.matrix.block
        found *= self._scales(blocks).index_select(0, places - blocks.start)
        return found.view(len(rows), width)[:, columns.start : columns.stop]

    def _scales(self, blocks: range) -> Tensor:
        """float32 [blocks]"""
        matrix = self.matrix
        stored = self.files.box(matrix.scales, (blocks,))
        if matrix.nested_codes is None or matrix.nested_scales is None:
            return stored
        places = torch.arange(blocks.start, blocks.stop, device=stored.device)
        outer_scales = self.files.box(matrix.nested_scales)[places // matrix.nested_block]
        return look_up(self.files.box(matrix.nested_codes), stored) * outer_scales + (
            matrix.nested_offset
        )
