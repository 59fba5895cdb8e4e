"""Sampling backends by the configuration's word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from engine.errors import ConfigError
from engine.flashinfer_loader import flashinfer_installed
from engine.sampling.base import SamplingBackend
from engine.sampling.state import SamplingState
from engine.sampling.torch_backend import TorchSampling


def _flashinfer(state: SamplingState) -> SamplingBackend:
    from engine.sampling.flashinfer_backend import FlashInferSampling

    return FlashInferSampling(state)


SAMPLING_BACKENDS: Mapping[str, Callable[[SamplingState], SamplingBackend]] = MappingProxyType(
    {"torch": TorchSampling, "flashinfer": _flashinfer}
)


def create_sampling_backend(name: str, state: SamplingState) -> SamplingBackend:
    """The backend called `name` over `state`. Raises `ConfigError` if there is none."""
    backend = SAMPLING_BACKENDS.get(name)
    if backend is None:
        known = ", ".join(sorted(SAMPLING_BACKENDS))
        raise ConfigError(f"sampling_backend: there is no {name!r}; choose one of: {known}")
    return backend(state)


def auto_sampling_backend(device: str) -> str:
    """What `sampling_backend: auto` means: flashinfer on a GPU where it is installed."""
    return "flashinfer" if device == "cuda" and flashinfer_installed() else "torch"
