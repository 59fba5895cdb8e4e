"""The gate of the feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class SiluAndMul:
    """silu(gate) * up (SwiGLU, Shazeer 2020)."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * d], gate first -> [N, d]"""
        size = gate_up.shape[-1] // 2
        return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
