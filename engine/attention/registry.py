"""The config's word for an attention backend -> the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:
    import torch

    from engine.attention.base import AttentionBackend, AttentionInputs

ATTENTION_BACKENDS: Registry[Callable[[AttentionInputs], AttentionBackend]] = Registry(
    "attention_backend",
    {
        "torch": "engine.attention.torch_backend:make_torch_attention",
        "flashinfer": "engine.attention.flashinfer_backend:FlashInferAttentionBackend",
        "flashinfer-fa3": "engine.attention.flashinfer_backend:make_fa3_attention",
    },
)


def auto_attention_backend(device: str, dtype: torch.dtype, head_dim: int) -> str:
    """What `attention_backend: auto` means: flashinfer where it is installed and has kernels."""
    from engine.flashinfer_loader import flashinfer_installed, supports_attention

    if device == "cuda" and supports_attention(dtype, head_dim) and flashinfer_installed():
        return "flashinfer"
    return "torch"
