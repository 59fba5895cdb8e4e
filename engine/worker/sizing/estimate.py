"""Calculates the tokens that the KV cache can hold on CPU, and the memory that a model takes.

On CUDA this is measured: `engine.worker.sizing.kv_sizing`.
"""

from __future__ import annotations

import torch

from engine.attention.kv_pool import MHATokenToKVPool, resolve_kv_dtype
from engine.config import resolve_model_path
from engine.distributed import ParallelState
from engine.errors import ConfigError
from engine.host_memory import available_host_bytes
from engine.layers.weight_format import weight_format
from engine.model_config import ModelConfig
from engine.models.loader import resolve_dtype
from engine.worker_config import WorkerConfig

# Bytes of KV cache that one CPU worker takes unless `max_total_tokens` says otherwise: the host's
# memory is shared with everything else on it.
CPU_MAX_BYTES = 4 << 30


def profile_max_tokens(config: WorkerConfig, engines: int = 1) -> int:
    """Tokens that fit on the CPU worker that needs most bytes per token.

    `memory_fraction` of the available memory is divided over the workers of the host's `engines`,
    at most `CPU_MAX_BYTES` each. The backend `torch` also keeps contiguous float32 copies on CPU
    (see `DecodeWorkspace`), which are counted. Raises `ConfigError` if not even one token fits.
    """
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, resolve_dtype(config.dtype))
    per_token = kv_bytes_per_token(config, kv_dtype)
    if config.attention_backend == "torch":
        per_token += kv_bytes_per_token(config, torch.float32)
    if config.speculative is not None and config.speculative.model is not None:
        per_token += _draft_bytes_per_token(config, kv_dtype)
    share = int(available_host_bytes() * (config.memory_fraction / engines)) // config.world_size
    budget = min(share, CPU_MAX_BYTES)
    tokens = budget // per_token
    if tokens < 1:
        raise ConfigError(
            f"no room for a KV cache: {budget} bytes are free on cpu and one token takes "
            f"{per_token}. Free memory, raise tp_size or pp_size, or use a smaller model."
        )
    return tokens


def stage_weight_bytes(config: WorkerConfig, parallel: ParallelState) -> int:
    """Bytes of one rank's matrices (norms and biases don't matter here)."""
    model, dtype, tp_size = config.model, resolve_dtype(config.dtype), parallel.tp_size
    form = weight_format(config.attention_backend, config.quantization)
    hidden = model.hidden_size
    queries = model.num_heads // tp_size * model.head_dim
    keys = model.local_kv_heads(tp_size) * model.head_dim
    inner = model.intermediate_size // tp_size
    matrices = [
        (queries + 2 * keys, hidden),
        (hidden, queries),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    layers = len(model.stage_layers(parallel.pp_size)[parallel.pp_rank])
    num_bytes = layers * sum(form.num_bytes(*size, dtype) for size in matrices)
    rows = -(-model.vocab_size // tp_size)
    if parallel.is_first_stage:
        num_bytes += rows * hidden * dtype.itemsize
    if parallel.is_first_stage and parallel.is_last_stage and model.tie_word_embeddings:
        num_bytes += form.tied_bytes(rows, hidden, dtype)
    elif parallel.is_last_stage:
        num_bytes += form.num_bytes(rows, hidden, dtype)
    return num_bytes


def kv_bytes_per_token(config: WorkerConfig, dtype: torch.dtype) -> int:
    """Bytes of one token in a KV cache of `dtype`, on the worker that holds most layers."""
    model = config.model
    layers = max(len(stage) for stage in model.stage_layers(config.pp_size))
    heads = model.local_kv_heads(config.tp_size)
    return MHATokenToKVPool.bytes_per_token(layers, heads, model.head_dim, dtype)


def _draft_bytes_per_token(config: WorkerConfig, dtype: torch.dtype) -> int:
    """Bytes of one token in the KV cache of the draft model, which every worker has whole."""
    assert config.speculative is not None and config.speculative.model is not None
    model = ModelConfig.from_pretrained(resolve_model_path(config.speculative.model))
    return MHATokenToKVPool.bytes_per_token(
        model.num_layers, model.num_kv_heads, model.head_dim, dtype
    )
