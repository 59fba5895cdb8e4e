"""`GpuFormat`: on GPUs, what the checkpoint has quantized stays so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device.triton_loader import lack_of_triton
from engine.layers.embedding_table import EmbeddingTable
from engine.layers.gpu_kernel import GpuKernel
from engine.layers.gpu_weight import GpuWeight, pack_float8, pack_grouped
from engine.layers.grouped import Grouped
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import MatrixSlice, PlainFormat, TensorReader, WeightFormat

HALF_DTYPES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
"""Compute capability of the GPUs that the kernels were written for."""


class GpuFormat(PlainFormat):
    """Matrices of the model's own type by torch, and quantized ones by our kernels in Triton.

    Slices that belong together stay quantized if all of them can; otherwise they are dequantized.
    """

    keeps_groups = True

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: that of the inputs, float16 or bfloat16."""
        self._dtype = dtype

    def keep(
        self,
        source: TensorReader,
        slices: Sequence[MatrixSlice],
        bias: Tensor | None,
        rows: int | None = None,
    ) -> LinearKernel | None:
        weights = []
        for part in slices:
            found = packed(source, part, rows)
            if found is None:
                return None
            weights.append(found)
        return self._kernel(weights, bias)

    def grouped(self, parts: Sequence[Grouped], bias: Tensor | None) -> LinearKernel:
        weights = [weight for part in parts if (weight := pack_grouped(part)) is not None]
        assert len(weights) == len(parts), "groups that have no kernel"
        return self._kernel(weights, bias)

    def _kernel(self, weights: Sequence[GpuWeight], bias: Tensor | None) -> LinearKernel:
        kernel = GpuKernel(weights, bias)
        kernel.compile(self._dtype)
        return kernel

    def table(self, kernel: LinearKernel, dtype: torch.dtype) -> EmbeddingTable:
        assert isinstance(kernel, GpuKernel)
        return GpuTable(kernel, dtype)


class GpuTable(EmbeddingTable):
    """The rows lie quantized, as our kernel multiplies by them. One that isn't there is NaN."""

    def __init__(self, kernel: GpuKernel, dtype: torch.dtype) -> None:
        self.kernel, self._dtype = kernel, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return self.kernel.rows(ids, self._dtype)


def packed(source: TensorReader, part: MatrixSlice, rows: int | None = None) -> GpuWeight | None:
    """`part` as the kernels have it, with zeros behind it up to `rows`; None: it must become plain.
    Raises `ConfigError`."""
    numbers = source.quantized(part)
    if numbers is not None:
        return pack_grouped(numbers.padded(rows or numbers.shape[0]))
    floats = source.float8(part)
    return None if floats is None else pack_float8(floats.padded(rows or floats.shape[0]))


def format_on(device: torch.device, dtype: torch.dtype) -> WeightFormat:
    """The format where a GPU has the kernels, else the one without any."""
    if device.type != "cuda" or dtype not in HALF_DTYPES or lack_of_triton():
        return PlainFormat()
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return PlainFormat()
    return GpuFormat(dtype)
