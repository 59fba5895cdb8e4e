"""Build a model and fill this rank's share of its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.distributed import ParallelState
from engine.errors import ConfigError
from engine.model_config import ModelConfig
from engine.models.llama import LlamaModel
from engine.models.registry import model_class
from engine.models.weights import DummySource, SafetensorsSource, WeightSource

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """torch's type for `dtype`; "auto" is the checkpoint's. Raises `ConfigError` on other words."""
    name = config.dtype if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype '{name}' is not supported; use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelState,
    max_positions: int,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LlamaModel:
    """The model's stage and shard of `parallel`, with weights.

    `load_format`: "auto" reads the folder's safetensors, "dummy" makes random weights from
    `seed`. `progress(done, total)` is called after each decoder layer. Raises `ConfigError` if
    the checkpoint or the split doesn't fit.
    """
    source: WeightSource
    if load_format == "auto":
        source = SafetensorsSource(config.path, dtype, device)
    elif load_format == "dummy":
        source = DummySource(seed, dtype, device)
    else:
        raise ConfigError(f"load_format '{load_format}' is not known; use auto or dummy.")
    model = model_class(config.architecture)(config, dtype, device, parallel, max_positions)
    model.load(source, progress)
    return model
