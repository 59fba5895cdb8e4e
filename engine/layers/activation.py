"""The gate of the feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.layers.fused_ops import FusedOps


class SiluAndMul:
    """Computes silu(gate) * up (SwiGLU, Shazeer 2020)."""

    def __init__(self, fused: FusedOps | None = None) -> None:
        self.fused = fused

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * d], gate first -> [N, d]"""
        if self.fused is not None:
            return self.fused.silu_and_mul(gate_up)
        size = gate_up.shape[-1] // 2
        return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
