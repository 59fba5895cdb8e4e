"""The tokens that the KV cache can hold on CPU, and the memory that a model takes, of a worker.

The figures are those of `engine.memory_need`. On CUDA the cache is measured:
`engine.worker.sizing.kv_sizing`.
"""

from __future__ import annotations

import torch

from engine.checkpoint.weight_formats import weight_form
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.memory_need import (
    MemoryNeed,
    cache_bytes_per_token,
    gpu_share,
    host_cache_tokens,
    kept_files,
    stage_bytes,
)
from engine.models.loader import resolve_dtype
from engine.process.host_memory import available_host_bytes


def memory_of(config: WorkerConfig) -> MemoryNeed:
    """What the ranks of the engine take."""
    return MemoryNeed.of(config.resolved, config.dtype, config.kernels, config.device)


def profile_max_tokens(config: WorkerConfig, engines: int = 1) -> int:
    """Tokens that fit on the CPU worker that needs most bytes per token, where `engines` share the
    host. Raises `ConfigError` if not even one fits."""
    free, need = available_host_bytes(), memory_of(config)
    return host_cache_tokens(need, free, config.engine.memory_fraction, engines)


def stage_weight_bytes(config: WorkerConfig, parallel: ParallelState) -> int:
    """Bytes of one rank's matrices; at least so many, if some stay quantized on a GPU."""
    item, form = resolve_dtype(config.dtype).itemsize, weight_form(config.engine.quantization)
    split = parallel.tp_size, parallel.pp_size, parallel.pp_rank
    engine, model = config.engine, config.model
    files = kept_files(engine, model, config.kernels.layers, config.device)
    share = gpu_share(engine, model, config.dtype, config.device)
    return int(share * stage_bytes(model, item, *split, form, parallel.ep_size, files))


def plain_weight_bytes(config: WorkerConfig, parallel: ParallelState) -> int:
    """The same if they all were plain, of the model's type."""
    split = parallel.tp_size, parallel.pp_size, parallel.pp_rank
    item = resolve_dtype(config.dtype).itemsize
    return stage_bytes(config.model, item, *split, ep_size=parallel.ep_size)


def kv_bytes_per_token(config: WorkerConfig, dtype: torch.dtype) -> int:
    """Bytes of one token in a KV cache of `dtype`, on the worker that holds most layers."""
    return cache_bytes_per_token(
        config.model, dtype.itemsize, config.engine.tp_size, config.engine.pp_size
    )
