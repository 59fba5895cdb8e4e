"""`GpuFormat`: on GPUs, what the checkpoint has quantized stays so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.device.triton_loader import lack_of_triton
from engine.layers.embedding_table import EmbeddingTable
from engine.layers.float8_groups import Quantized
from engine.layers.gpu_experts import GpuExperts
from engine.layers.gpu_kernel import GpuKernel
from engine.layers.gpu_weight import can_pack, pack
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import PlainFormat, WeightFormat

HALF_DTYPES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
"""Compute capability of the GPUs that the kernels were written for."""


class GpuFormat(PlainFormat):
    """Matrices of the model's own type by torch, and quantized ones by our kernels in Triton.

    Slices that belong together stay quantized if all of them can; otherwise they are dequantized.
    """

    keeps_groups = keeps_float8 = True

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: that of the inputs, float16 or bfloat16."""
        self._dtype = dtype

    def can_keep(self, part: Quantized) -> bool:
        return can_pack(part)

    def grouped(self, parts: Sequence[Quantized], bias: Tensor | None) -> LinearKernel:
        kernel = GpuKernel([pack(part) for part in parts], bias)
        kernel.compile(self._dtype)
        return kernel

    def experts(
        self, parts: Iterable[Sequence[Quantized] | None], bias: Tensor | None
    ) -> GpuExperts | None:
        found = GpuExperts.of(parts, bias)
        if found is not None:
            found.compile(self._dtype)
        return found

    def table(self, kernel: LinearKernel, dtype: torch.dtype) -> EmbeddingTable:
        assert isinstance(kernel, GpuKernel)
        return GpuTable(kernel, dtype)


class GpuTable(EmbeddingTable):
    """The rows lie quantized, as our kernel multiplies by them. One that isn't there is NaN."""

    def __init__(self, kernel: GpuKernel, dtype: torch.dtype) -> None:
        self.kernel, self._dtype = kernel, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return self.kernel.rows(ids, self._dtype)


def format_on(device: torch.device, dtype: torch.dtype) -> WeightFormat:
    """The format where a GPU has the kernels, else the one without any."""
    if device.type != "cuda" or dtype not in HALF_DTYPES or lack_of_triton():
        return PlainFormat()
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return PlainFormat()
    return GpuFormat(dtype)
