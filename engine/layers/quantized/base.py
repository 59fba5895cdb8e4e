"""`MatrixReader`: a quantized matrix, of which any part can be had."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.checkpoint.quantized.matrices import StoredMatrix
from engine.layers.float8_groups import Float8Groups
from engine.layers.grouped import Grouped
from engine.registry import MATRIX_READERS

M = TypeVar("M", bound=StoredMatrix)
Box = tuple[range, ...]
"""Neighbouring places along each dimension."""


class Boxes(Protocol):
    """The tensors of a checkpoint, on a device."""

    device: torch.device

    def box(self, name: str, box: Sequence[range] | None = None) -> Tensor:
        """That part of the tensor `name`, or all of it, in the type of the file."""
        ...


class MatrixReader(ABC, Generic[M]):
    """Reads one `StoredMatrix`, whose tensors fit each other as their headers say."""

    def __init__(self, matrix: M, files: Boxes) -> None:
        self.matrix, self.files = matrix, files

    @abstractmethod
    def dequantized(self, box: Box) -> Tensor:
        """float32, of the shape of `box`. Raises `ConfigError` if numbers of the files are out of
        their bounds."""

    def grouped(self, rows: range, columns: range) -> Grouped | None:
        """The same part of a matrix of two dimensions as whole numbers; None if it isn't such, or
        if the part cuts through groups."""
        return None

    def grouped_of(self, number: int, rows: range, columns: range) -> Grouped | None:
        """The same of one of stacked matrices, of which `rows` are outputs, whichever way they
        lie."""
        return None

    def float8(self, rows: range, columns: range) -> Float8Groups | None:
        """The same for float8 numbers (e4m3)."""
        return None

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """`dequantized` in `dtype`. Of stacked matrices only one at a time is in float32."""
        if len(box) < 3:
            return self.dequantized(box).to(dtype)
        found: Tensor | None = None
        for place, number in enumerate(box[0]):
            one = self.dequantized((range(number, number + 1), *box[1:]))
            if found is None:
                found = one.new_empty([len(part) for part in box], dtype=dtype)
            found[place] = one[0]
        assert found is not None, "an empty part of a stack of matrices"
        return found


def make_reader(matrix: StoredMatrix, files: Boxes) -> MatrixReader[Any]:
    """The reader of `matrix`."""
    reader: MatrixReader[Any] = MATRIX_READERS[matrix.reader](matrix, files)
    return reader


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple(range(size) for size in shape)


def part_box(shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """A tensor's places [start, stop) along `dim`."""
    return tuple(range(start, stop) if i == dim else range(n) for i, n in enumerate(shape))


def outer(part: range, size: int) -> range:
    """Blocks of `size` that `part` touches."""
    return range(part.start // size, -(-part.stop // size))


def inner(part: range, blocks: range, size: int) -> slice:
    """Where `part` lies in what `blocks` hold."""
    first = part.start - blocks.start * size
    return slice(first, first + len(part))


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 * n] of 4 bits each; the low half of a byte comes first."""
    halves = [packed & 15, packed >> 4]
    return torch.stack(halves[::-1] if high_first else halves, -1).flatten(-2)


def look_up(table: Tensor, numbers: Tensor) -> Tensor:
    """`table[numbers]` for a table of a few entries. `numbers`: uint8, each below its length."""
    return table.index_select(0, numbers.flatten().int()).view(numbers.shape)
