"""`KernelSet`: kernels that belong together, behind one word of `kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.checkpoint.weight_formats import weight_form
from engine.layers.fused_ops import CpuOps, FlashInferOps, FusedOps, no_ops
from engine.layers.gpu_format import format_on
from engine.layers.weight_format import NativeFormat, WeightFormat
from engine.registry import find


@dataclass(frozen=True)
class KernelSet:
    """What computes a model's layers. Attention and sampling have backends that go with it and can
    be chosen apart from it (`EngineConfig.kernel_choice`)."""

    own_format: Callable[[torch.device, torch.dtype], WeightFormat]
    """Keeps matrices of the model's own type, and those that the checkpoint has quantized as they
    are if there are kernels for them."""
    fused_ops: Callable[[torch.device, torch.dtype], FusedOps | None]
    """The small operations between the matrix products; None: with torch."""

    def weight_format(
        self, quantization: str, device: torch.device, dtype: torch.dtype
    ) -> WeightFormat:
        """How matrices are kept for the configuration's `quantization`. Raises `ConfigError` on
        unknown words."""
        layers = weight_form(quantization).layers
        if not layers:
            return self.own_format(device, dtype)
        made: WeightFormat = find(layers)()
        return made


TORCH = KernelSet(format_on, no_ops)
CPU = KernelSet(NativeFormat.on, CpuOps.on)
FLASHINFER = KernelSet(format_on, FlashInferOps.on)
