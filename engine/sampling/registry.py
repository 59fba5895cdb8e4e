"""Sampling backends by the configuration's word."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.errors import ConfigError
from engine.sampling.base import SamplingBackend
from engine.sampling.state import SamplingState
from engine.sampling.torch_backend import TorchSampling

SAMPLING_BACKENDS: Mapping[str, type[SamplingBackend]] = MappingProxyType({"torch": TorchSampling})


def create_sampling_backend(name: str, state: SamplingState) -> SamplingBackend:
    """The backend called `name` over `state`. Raises `ConfigError` if there is none."""
    backend = SAMPLING_BACKENDS.get(name)
    if backend is None:
        known = ", ".join(sorted(SAMPLING_BACKENDS))
        raise ConfigError(f"sampling_backend: there is no {name!r}; choose one of: {known}")
    return backend(state)
