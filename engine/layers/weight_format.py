"""How weight matrices are kept: what is read for a layer, and its kernel.

What they take of memory is calculated in `engine.memory_need`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.layers.embedding_table import EmbeddingTable, PackedTable, RowTable
from engine.layers.grouped import Grouped
from engine.layers.linear_kernel import (
    Int8Kernel,
    LinearKernel,
    NativeKernel,
    SharedRowsKernel,
    make_linear_kernel,
)


class TensorReader(Protocol):
    """What a format needs of a `WeightSource`."""

    def get(self, name: str, shape: tuple[int, ...], *, dim: int, start: int, count: int) -> Tensor:
        """See `WeightSource.get`."""
        ...

    def quantized(self, part: MatrixSlice) -> Grouped | None:
        """See `WeightSource.quantized`."""
        ...


@dataclass(frozen=True)
class MatrixSlice:
    """`count` rows (dim 0) or columns (dim 1) from `start` of a matrix of the checkpoint.

    `name` is without ".weight": a quantized checkpoint has other tensors under it, such as
    "qweight" and "scales". Rows are outputs.
    """

    name: str
    out_size: int
    """Rows of the whole matrix."""
    in_size: int
    dim: int
    start: int
    count: int


class TiedMatrix(NamedTuple):
    """A matrix [vocabulary, hidden] as an embedding reads it and as its output head multiplies."""

    table: EmbeddingTable
    kernel: LinearKernel


class WeightFormat(ABC):
    """One way to keep matrices. All layers of a model have the same one."""

    def load(
        self, source: TensorReader, slices: Sequence[MatrixSlice], bias: Tensor | None
    ) -> LinearKernel:
        """The kernel of `slices`, one below the other, with `bias` [out].

        This is for formats that are made from plain tensors. A format that the checkpoint is in
        has a method of its own: it turns each slice into slices of its tensors, and raises
        `ConfigError` where a slice cuts through a group or a packed number.
        """
        weights = [
            source.get(
                f"{part.name}.weight",
                (part.out_size, part.in_size),
                dim=part.dim,
                start=part.start,
                count=part.count,
            )
            for part in slices
        ]
        return self.linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """The kernel of a plain `weight` [out, in] and `bias` [out]. The caller drops its
        references, so that no matrix is in memory twice."""

    @abstractmethod
    def tied(self, weight: Tensor) -> TiedMatrix:
        """A plain `weight` that an embedding and its output head share. The caller drops its
        references, as for `linear`."""


class PlainFormat(WeightFormat):
    """The model's own type, multiplied by torch."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        return make_linear_kernel(weight, bias)

    def tied(self, weight: Tensor) -> TiedMatrix:
        return TiedMatrix(RowTable(weight), SharedRowsKernel(weight))


class NativeFormat(WeightFormat):
    """The model's own type, multiplied by our kernels on CPU."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        return NativeKernel(weight, bias)

    def tied(self, weight: Tensor) -> TiedMatrix:
        """In panels only: the embedding picks its rows out of them."""
        kernel = NativeKernel(weight, None)
        return TiedMatrix(PackedTable(kernel), kernel)


class Int8Format(WeightFormat):
    """int8 with a scale for each output, made while a plain checkpoint is read; for our kernels.

    A scale belongs to a row of the rank's slice. So ranks that own columns have scales of their
    own, and their sum differs a little from what one rank computes.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        return Int8Kernel(weight, bias)

    def tied(self, weight: Tensor) -> TiedMatrix:
        """The head has a copy: the embedding keeps its exact rows."""
        return TiedMatrix(RowTable(weight), Int8Kernel(weight, None))
