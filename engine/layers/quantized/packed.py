"""Whole numbers of 2, 4 or 8 bits, several in an int32."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.quantized.matrices import PackedMatrix
from engine.errors import ConfigError
from engine.layers.grouped import Grouped
from engine.layers.quantized.base import Box, Boxes, MatrixReader, inner, outer

LEAST_GROUP = 32
"""Groups are halved for a part that cuts through them, down to so many inputs."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where output j lies among the eight of an int32."""


class PackedReader(MatrixReader[PackedMatrix]):
    """What the layouts have in common. See `PackedMatrix`."""

    def __init__(self, matrix: PackedMatrix, files: Boxes) -> None:
        super().__init__(matrix, files)
        self.per = 32 // matrix.bits
        self._order: Tensor | None = None

    @abstractmethod
    def numbers(self, rows: range, columns: range) -> Tensor:
        """uint8 [rows, columns]"""

    @abstractmethod
    def scales(self, rows: range, groups: range) -> Tensor:
        """[rows, groups], in the type of the file."""

    @abstractmethod
    def stored_zeros(self, rows: range, groups: range) -> Tensor:
        """uint8 [rows, groups]"""

    def dequantized(self, box: Box) -> Tensor:
        rows, columns = box
        groups, places = self._groups(columns)
        found = self.numbers(rows, columns).float()
        if self.matrix.zeros is None:
            found -= 1 << (self.matrix.bits - 1)
        else:
            found -= self._zeros(rows, groups).float().index_select(1, places)
        found *= self.scales(rows, groups).float().index_select(1, places)
        return found

    def grouped(self, rows: range, columns: range) -> Grouped | None:
        """None, too, if the groups aren't neighbouring inputs."""
        if self._group_of_input() is not None:
            return None
        size = self.matrix.group
        groups = outer(columns, size)
        unit = len(columns)
        if len(groups) > 1:
            unit = math.gcd(size, columns.start, len(columns))
            if unit < min(size, LEAST_GROUP):
                return None
        numbers, center = self.numbers(rows, columns), 1 << (self.matrix.bits - 1)
        starts = torch.arange(columns.start, columns.stop, unit, device=numbers.device)
        places = starts // size - groups.start
        scales = self.scales(rows, groups).index_select(1, places)
        mins = None
        if self.matrix.zeros is not None:
            zeros = self._zeros(rows, groups).float().index_select(1, places) - center
            if bool(zeros.any()):
                scales = scales.float()
                mins = scales * zeros
        return Grouped(numbers, self.matrix.bits, center, unit, scales.contiguous(), mins)

    def _zeros(self, rows: range, groups: range) -> Tensor:
        """uint8 [rows, groups]"""
        found, shift = self.stored_zeros(rows, groups), self.matrix.zero_shift
        return (found + shift) & ((1 << self.matrix.bits) - 1) if shift else found

    def _groups(self, columns: range) -> tuple[range, Tensor]:
        """Groups that must be read for `columns`, and of each column the place of its own there:
        int64 [columns]."""
        order = self._group_of_input()
        if order is not None:
            return range(self.matrix.num_groups), order[columns.start : columns.stop]
        groups = outer(columns, self.matrix.group)
        inputs = torch.arange(columns.start, columns.stop, device=self.files.device)
        return groups, inputs // self.matrix.group - groups.start

    def _group_of_input(self) -> Tensor | None:
        """int64 [in]; None if groups are neighbouring inputs. Raises `ConfigError` if one is none
        of the groups."""
        matrix = self.matrix
        if matrix.order is None:
            return None
        if self._order is None:
            self._order = self.files.box(matrix.order).long()
            if bool((self._order == -1).all()):  # compressed-tensors: not set
                self._order = _neighbours(self._order, matrix.group)
        order = self._order
        if int(order.min()) < 0 or int(order.max()) >= matrix.num_groups:
            raise ConfigError(
                f"'{matrix.order}' names groups from {int(order.min())} to {int(order.max())}, and "
                f"'{matrix.name}' has {matrix.num_groups}; download the model again."
            )
        return None if torch.equal(order, _neighbours(order, matrix.group)) else order


class RowsReader(PackedReader):
    """compressed-tensors: [out, in / per]; zeros lie along outputs."""

    def numbers(self, rows: range, columns: range) -> Tensor:
        words = outer(columns, self.per)
        found = unpack(self.files.box(self.matrix.numbers, (rows, words)), self.matrix.bits)
        return found[:, inner(columns, words, self.per)].contiguous()

    def scales(self, rows: range, groups: range) -> Tensor:
        found = self.files.box(self.matrix.scales).view(self.matrix.shape[0], -1)
        return found[rows.start : rows.stop, groups.start : groups.stop]

    def stored_zeros(self, rows: range, groups: range) -> Tensor:
        assert self.matrix.zeros is not None
        words = outer(rows, self.per)
        packed = self.files.box(self.matrix.zeros, (words, groups))
        return unpack(packed.t(), self.matrix.bits)[:, inner(rows, words, self.per)].t()


class GptqReader(PackedReader):
    """[in / per, out]; zeros and scales are transposed, too."""

    def numbers(self, rows: range, columns: range) -> Tensor:
        words = outer(columns, self.per)
        packed = self.files.box(self.matrix.numbers, (words, rows))
        found = unpack(packed.t(), self.matrix.bits)
        return found[:, inner(columns, words, self.per)].contiguous()

    def scales(self, rows: range, groups: range) -> Tensor:
        return self.files.box(self.matrix.scales, (groups, rows)).t()

    def stored_zeros(self, rows: range, groups: range) -> Tensor:
        assert self.matrix.zeros is not None
        return self._along_outputs(self.matrix.zeros, rows, groups)

    def _along_outputs(self, name: str, rows: range, others: range) -> Tensor:
        """uint8 [rows, others] of a tensor [others, out / per]."""
        words = outer(rows, self.per)
        found = self._unpack(self.files.box(name, (others, words)))
        return found[:, inner(rows, words, self.per)].t()

    def _unpack(self, packed: Tensor) -> Tensor:
        return unpack(packed, self.matrix.bits)


class AwqReader(GptqReader):
    """[in, out / 8], and outputs in an order of their own."""

    def numbers(self, rows: range, columns: range) -> Tensor:
        return self._along_outputs(self.matrix.numbers, rows, columns).contiguous()

    def _unpack(self, packed: Tensor) -> Tensor:
        found = super()._unpack(packed)
        return found.view(len(found), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


_LAYOUTS: dict[str, Any] = {"rows": RowsReader, "gptq": GptqReader, "awq": AwqReader}


def make_packed_reader(matrix: PackedMatrix, files: Boxes) -> PackedReader:
    """That of the matrix' layout."""
    reader: PackedReader = _LAYOUTS[matrix.layout](matrix, files)
    return reader


def unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, words] -> uint8 [n, words * 32 / bits], from the low bits up. `bits`: 2, 4 or 8."""
    # Not `contiguous`: it keeps odd strides of dimensions of size 1.
    found = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return found
    shifts = range(0, 8, bits)
    return torch.stack([(found >> shift) & ((1 << bits) - 1) for shift in shifts], -1).flatten(-2)


def _neighbours(order: Tensor, group: int) -> Tensor:
    return torch.arange(len(order), device=order.device) // group
