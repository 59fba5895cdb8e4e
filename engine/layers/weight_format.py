"""How weight matrices are kept: what is read for a layer, and its kernel.

What they take of memory is calculated in `engine.memory_need`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.layers.embedding_table import EmbeddingTable, GroupedTable, PackedTable, RowTable
from engine.layers.float8_groups import Float8Groups, Quantized
from engine.layers.grouped import GROUP, SMALL_GROUP, Grouped, can_quantize, quantize
from engine.layers.linear_kernel import (
    GroupedKernel,
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

    def float8(self, part: MatrixSlice) -> Float8Groups | None:
        """See `WeightSource.float8`."""
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
        """The kernel of `slices`, one below the other, with `bias` [out]."""
        kept = self.keep(source, slices, bias)
        if kept is not None:
            return kept
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

    keeps_groups = False
    """Whether matrices that the checkpoint has quantized in groups stay so (`grouped`). Otherwise
    they become plain ones of the model's type while they are read."""

    keeps_float8 = False
    """The same of matrices of float8 numbers, in groups or not."""

    short_inputs = False
    """Whether inputs of products with quantized matrices have 8 bits, on CPU
    (`activation_quantization`)."""

    def keep(
        self,
        source: TensorReader,
        slices: Sequence[MatrixSlice],
        bias: Tensor | None,
        rows: int | None = None,
    ) -> LinearKernel | None:
        """The kernel of `slices` as the checkpoint has them quantized; None: as plain matrices they
        are to be had. `rows`: with zeros behind a single slice, up to so many."""
        if not self.keeps_groups:
            return None
        parts = []
        for part in slices:
            found = self.part(source, part)
            if found is None:
                return None
            parts.append(found if rows is None else found.padded(rows))
        return self.grouped(parts, bias)

    def part(self, source: TensorReader, part: MatrixSlice) -> Quantized | None:
        """`part` as the checkpoint has it quantized, if it can stay so."""
        if not self.keeps_groups:
            return None
        found: Quantized | None = source.quantized(part)
        if found is None and self.keeps_float8:
            found = source.float8(part)
        return found if found is not None and self.can_keep(found) else None

    def can_keep(self, part: Quantized) -> bool:
        """Whether kernels multiply by `part` as it is, where `keeps_groups`."""
        raise NotImplementedError

    def grouped(self, parts: Sequence[Quantized], bias: Tensor | None) -> LinearKernel:
        """The kernel of quantized matrices that `can_keep`, one below the other."""
        raise NotImplementedError

    def experts(
        self, parts: Iterable[Sequence[Quantized] | None], bias: Tensor | None
    ) -> Any | None:
        """Products of a mixture with quantized matrices that `can_keep`: for each expert those
        that lie one below the other, and its row of `bias` [experts, out]. None: they are to be
        plain, as when `parts` has a None. What else it is, the class of the mixture knows
        (`engine.layers.experts`, `engine.layers.grouped_experts`)."""
        raise NotImplementedError

    def table(self, kernel: LinearKernel, dtype: torch.dtype) -> EmbeddingTable:
        """The rows, of `dtype`, of what `keep` gave."""
        raise NotImplementedError

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
    """The model's own type, or what the checkpoint has quantized, multiplied by our kernels on
    CPU."""

    keeps_groups = True

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> NativeFormat:
        """The format; it is the same for all types."""
        return cls()

    def can_keep(self, part: Quantized) -> bool:
        return isinstance(part, Grouped) and has_kernel(part)

    def grouped(self, parts: Sequence[Quantized], bias: Tensor | None) -> LinearKernel:
        groups = [part for part in parts if isinstance(part, Grouped)]
        assert len(groups) == len(parts), "parts that have no kernel"
        return GroupedKernel(groups, bias, self.short_inputs)

    def experts(
        self, parts: Iterable[Sequence[Quantized] | None], bias: Tensor | None
    ) -> list[LinearKernel] | None:
        kernels: list[LinearKernel] = []
        for own in parts:
            if own is None:
                return None
            mine = None if bias is None else bias[len(kernels)].contiguous()
            kernels.append(self.grouped(own, mine))
        return kernels

    def table(self, kernel: LinearKernel, dtype: torch.dtype) -> EmbeddingTable:
        assert isinstance(kernel, GroupedKernel)
        return GroupedTable(kernel, torch.empty(0, dtype=dtype))

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        return NativeKernel(weight, bias)

    def tied(self, weight: Tensor) -> TiedMatrix:
        """In panels only: the embedding picks its rows out of them."""
        kernel = NativeKernel(weight, None)
        return TiedMatrix(PackedTable(kernel), kernel)


class QuantizedFormat(NativeFormat):
    """Numbers of a few bits with a scale for each 32 neighbouring inputs, made while a plain
    checkpoint is read (`quantize`); for our kernels. A matrix whose inputs groups don't divide
    stays plain.

    A group belongs to a row of the rank's slice. So ranks whose columns cut through groups have
    other ones than a single rank has.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        if not can_quantize(weight.shape[1]):
            return super().linear(weight, bias)
        return self.grouped([quantize(weight, self.bits)], bias)

    def tied(self, weight: Tensor) -> TiedMatrix:
        """The head has a copy: the embedding keeps its exact rows."""
        return TiedMatrix(RowTable(weight), self.linear(weight, None))


def has_kernel(part: Grouped) -> bool:
    """Whether our kernels multiply by it as it is."""
    return part.group == SMALL_GROUP or part.group % GROUP == 0


int8_format, int4_format = partial(QuantizedFormat, 8), partial(QuantizedFormat, 4)
