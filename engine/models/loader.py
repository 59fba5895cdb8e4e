"""Build a model and fill this rank's share of its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.checkpoint.gguf.folder import is_gguf_folder
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.gguf_source import GgufSource
from engine.layers.kernel_set import KernelSet
from engine.layers.weights import DummySource, SafetensorsSource, WeightSource
from engine.models.base import Model
from engine.process.host_memory import give_back_freed
from engine.registry import KERNELS, MODELS

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str) -> torch.dtype:
    """torch's type for the config's word. Raises `ConfigError` on other words."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype '{name}' is not supported; use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def load_model(
    config: WorkerConfig,
    parallel: ParallelState,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """The model's stage and shard of `parallel`, with weights.

    `load_format` "auto" reads the folder's checkpoint, "dummy" makes random weights from `seed`.
    `progress(done, total)` is called after each decoder layer. Raises `ConfigError` if the
    checkpoint doesn't fit its config.json.
    """
    dtype = resolve_dtype(config.dtype)
    source: WeightSource
    if config.engine.load_format == "auto":
        reads = GgufSource if is_gguf_folder(config.model.path) else SafetensorsSource
        source = reads(config.model.path, dtype, device)
    elif config.engine.load_format == "dummy":
        source = DummySource(config.engine.seed, dtype, device)
    else:
        raise ConfigError(
            f"load_format '{config.engine.load_format}' is not known; use auto or dummy."
        )
    kernels: KernelSet = KERNELS[config.kernels.layers]
    source.format = kernels.weight_format(config.engine.quantization, device, dtype)
    source.format.short_inputs = config.engine.has_short_activations(config.dtype)
    build = MODELS[config.model.architecture]
    model: Model = build(
        config.model,
        dtype,
        device,
        parallel,
        config.max_model_len,
        kernels.fused_ops(device, dtype),
    )
    model.load(source, progress)
    give_back_freed()  # parts of the file that became something else
    return model
