"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.weights import WeightSource


class RMSNorm:
    """x / rms(x) * weight, over the last dimension; computed in float32 as transformers does."""

    weight: Tensor

    def __init__(self, size: int, eps: float) -> None:
        self.size = size
        self.eps = eps

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = source.get(name, (self.size,))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        wide = x.float()
        variance = wide.square().mean(-1, keepdim=True)
        return (wide * variance.add_(self.eps).rsqrt_()).to(x.dtype) * self.weight

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x)."""
        if residual is not None:
            x = torch.add(x, residual)
        return self(x), x
