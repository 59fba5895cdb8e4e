"""The config's word for an attention backend -> the backend."""

from __future__ import annotations

from collections.abc import Callable

from engine.attention.base import AttentionBackend, AttentionInputs
from engine.attention.torch_backend import TorchAttentionBackend
from engine.errors import ConfigError

_BACKENDS: dict[str, Callable[[AttentionInputs], AttentionBackend]] = {
    "torch": TorchAttentionBackend,
}


def create_attention_backend(name: str, inputs: AttentionInputs) -> AttentionBackend:
    """Raises `ConfigError` naming the known backends."""
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend '{name}' is not known; available: {', '.join(_BACKENDS)}."
        )
    return _BACKENDS[name](inputs)
