"""The config's word for an attention backend -> the backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import AttentionBackend, AttentionInputs
from engine.attention.torch_backend import TorchAttentionBackend
from engine.errors import ConfigError
from engine.flashinfer_loader import flashinfer_installed, supports_attention


def _flashinfer(inputs: AttentionInputs) -> AttentionBackend:
    from engine.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(inputs)


def _flashinfer_fa3(inputs: AttentionInputs) -> AttentionBackend:
    from engine.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(inputs, prefill_backend="fa3")


_BACKENDS: dict[str, Callable[[AttentionInputs], AttentionBackend]] = {
    "torch": TorchAttentionBackend,
    "flashinfer": _flashinfer,
    "flashinfer-fa3": _flashinfer_fa3,
}


def create_attention_backend(name: str, inputs: AttentionInputs) -> AttentionBackend:
    """Raises `ConfigError` naming the known backends, or what a known one lacks."""
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend '{name}' is not known; available: {', '.join(_BACKENDS)}."
        )
    return _BACKENDS[name](inputs)


def auto_attention_backend(device: str, dtype: torch.dtype, head_dim: int) -> str:
    """What `attention_backend: auto` means: flashinfer where it is installed and has kernels."""
    if device == "cuda" and supports_attention(dtype, head_dim) and flashinfer_installed():
        return "flashinfer"
    return "torch"
