"""The config's word for a sampling backend -> the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:
    from engine.sampling.base import SamplingBackend
    from engine.sampling.state import SamplingState

SAMPLING_BACKENDS: Registry[Callable[[SamplingState], SamplingBackend]] = Registry(
    "sampling_backend",
    {
        "torch": "engine.sampling.torch_backend:TorchSampling",
        "flashinfer": "engine.sampling.flashinfer_backend:FlashInferSampling",
    },
)


def auto_sampling_backend(device: str) -> str:
    """What `sampling_backend: auto` means: flashinfer on a GPU where it is installed."""
    from engine.flashinfer_loader import flashinfer_installed

    return "flashinfer" if device == "cuda" and flashinfer_installed() else "torch"
