"""FlashInfer's kernels for the small operations between the matrix products.

Each kernel is one launch in place of three to ten and reads its input once. Without FlashInfer, on
CPU and in float32, the layers compute with torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.flashinfer_loader import HALF_DTYPES, flashinfer_installed, load_flashinfer


class FusedOps:
    """The kernels. Tensors are float16 or bfloat16 on CUDA with a contiguous last dimension."""

    def __init__(self) -> None:
        """Raises `ConfigError` if FlashInfer is missing."""
        self._flashinfer: Any = load_flashinfer()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """A new tensor like x, [N, size] or [N, heads, size]; x may be a view with gaps."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():  # steps that sample nothing: a grid of 0 blocks can't be launched
            self._flashinfer.rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += x; x = norm(residual); both [N, size], N > 0, in place."""
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps)

    def rotate_(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        """Rotate q and k [T, heads, head_dim], T > 0, in place; they may be views with gaps.

        `positions` int64 [T]; `cos_sin` float32 [max_positions, head_dim]: half a row of cosines,
        half a row of sines.
        """
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q, k, q.shape[-1], cos_sin, is_neox=True
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * d], N > 0, gate first -> [N, d]"""
        result: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return result


def fused_ops(device: torch.device, dtype: torch.dtype) -> FusedOps | None:
    """The fused kernels where they can be used, else None. Call this once per model."""
    if device.type == "cuda" and dtype in HALF_DTYPES and flashinfer_installed():
        return FusedOps()
    return None
