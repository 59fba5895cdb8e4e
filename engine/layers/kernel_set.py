"""`KernelSet`: kernels that belong together, behind one word of `kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.checkpoint.weight_formats import weight_form
from engine.layers.fused_ops import CpuOps, FlashInferOps, FusedOps, no_ops
from engine.layers.weight_format import NativeFormat, PlainFormat, WeightFormat
from engine.registry import find


@dataclass(frozen=True)
class KernelSet:
    """What computes a model's layers. Attention and sampling have backends that go with it and can
    be chosen apart from it (`EngineConfig.kernel_choice`)."""

    plain_format: Callable[[], WeightFormat]
    """Keeps matrices of the model's own type."""
    fused_ops: Callable[[torch.device, torch.dtype], FusedOps | None]
    """The small operations between the matrix products; None: with torch."""

    def weight_format(self, quantization: str) -> WeightFormat:
        """How matrices are kept for the configuration's `quantization`. Raises `ConfigError` on
        unknown words."""
        layers = weight_form(quantization).layers
        if not layers:
            return self.plain_format()
        made: WeightFormat = find(layers)()
        return made


TORCH = KernelSet(PlainFormat, no_ops)
CPU = KernelSet(NativeFormat, CpuOps.on)
FLASHINFER = KernelSet(PlainFormat, FlashInferOps.on)
