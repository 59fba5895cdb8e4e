"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.fused_ops import FusedOps
from engine.layers.weights import WeightSource


class RMSNorm:
    """x / rms(x) * weight, over the last dimension; computed in float32 as transformers does."""

    weight: Tensor
    _eps: Tensor

    def __init__(self, size: int, eps: float, fused: FusedOps | None = None) -> None:
        self.size = size
        self.eps = eps
        self.fused = fused

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = source.get(name, (self.size,))
        self._eps = torch.tensor(self.eps, device=source.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], a new tensor"""
        if self.fused is not None:
            return self.fused.rms_norm(x, self.weight, self.eps)
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        # This takes half the operators of mean(x * x), and on CPU half the time.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / self.size).rsqrt_()
        return (x * scale).to(x.dtype).mul_(self.weight)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x).

        The caller must not use the arguments afterwards: with a residual they may hold the results.
        """
        if residual is not None:
            if self.fused is not None:
                self.fused.add_rms_norm_(x, residual, self.weight, self.eps)
                return x, residual
            x = torch.add(x, residual)
        return self(x), x
