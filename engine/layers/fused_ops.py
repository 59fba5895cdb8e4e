"""Kernels for the small operations between the matrix products: FlashInfer's, or our own on CPU.

Each kernel is one launch in place of three to ten and reads its input once. Where there are none,
the layers compute with torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from engine.device.flashinfer_loader import HALF_DTYPES, load_flashinfer
from engine.native.library import require_kernels


class FusedOps(ABC):
    """The kernels. Tensors have a contiguous last dimension."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """A new tensor like x, [N, size] or [N, heads, size]; x may be a view with gaps."""

    @abstractmethod
    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += x; x = norm(residual); both [N, size], N > 0, in place."""

    @abstractmethod
    def rotate_(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        """Rotate q and k [T, heads, head_dim], T > 0, in place; they may be views with gaps.

        `positions` int64 [T]; `cos_sin` float32 [max_positions, head_dim]: half a row of cosines,
        half a row of sines.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * d], N > 0, gate first -> [N, d]"""


class CpuOps(FusedOps):
    """The kernels of `engine/csrc/`, for float32, bfloat16 and float16 on CPU."""

    @staticmethod
    def on(device: torch.device, dtype: torch.dtype) -> FusedOps | None:
        """The kernels where they can be used. Raises `ConfigError` if the library is not there."""
        return CpuOps() if device.type == "cpu" else None

    def __init__(self) -> None:
        """Raises `ConfigError` if the library is not there."""
        self._kernels: Any = require_kernels()

    def new_recording(self) -> Any:
        """An empty `Recording` (engine/csrc/recording.h) for calls of the library's kernels."""
        return self._kernels.Recording()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._kernels.rms_norm(x, weight, eps)
        return out

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        self._kernels.add_rms_norm_(x, residual, weight, eps)

    def rotate_(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        self._kernels.rotate_(positions, q, k, cos_sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._kernels.silu_and_mul(gate_up)
        return out


class FlashInferOps(FusedOps):
    """FlashInfer's kernels, for float16 and bfloat16 on CUDA."""

    @staticmethod
    def on(device: torch.device, dtype: torch.dtype) -> FusedOps | None:
        """The kernels where they can be used. Raises `ConfigError` if FlashInfer is missing."""
        return FlashInferOps() if device.type == "cuda" and dtype in HALF_DTYPES else None

    def __init__(self) -> None:
        """Raises `ConfigError` if FlashInfer is missing."""
        self._flashinfer: Any = load_flashinfer()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():  # steps that sample nothing: a grid of 0 blocks can't be launched
            self._flashinfer.rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        self._flashinfer.fused_add_rmsnorm(x, residual, weight, eps)

    def rotate_(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions, q, k, q.shape[-1], cos_sin, is_neox=True
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        result: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return result


def no_ops(device: torch.device, dtype: torch.dtype) -> FusedOps | None:
    """torch has none: this needs neither package nor compiler."""
    return None
