"""How many tokens the KV cache can hold on CPU, and what a model takes, both by calculation.

On CUDA it is measured: `engine.worker.sizing.kv_sizing`.
"""

from __future__ import annotations

import torch

from engine.distributed import ParallelState
from engine.errors import ConfigError
from engine.host_memory import available_host_bytes
from engine.layers.linear import local_kv_heads
from engine.model_config import ModelConfig
from engine.models.llama import stage_layers
from engine.models.loader import resolve_dtype
from engine.worker.kv_pool import MHATokenToKVPool, resolve_kv_dtype

# Bytes of KV cache that one CPU worker takes unless `max_total_tokens` says otherwise: the host's
# memory is shared with everything else on it.
CPU_MAX_BYTES = 4 << 30


def profile_max_tokens(
    config: ModelConfig,
    dtype: str,
    tp_size: int,
    pp_size: int,
    fraction: float,
    kv_cache_dtype: str = "auto",
) -> int:
    """Tokens that fit on the CPU worker that needs most bytes per token.

    `fraction` of the available memory over the host's `tp_size * pp_size` workers, at most
    `CPU_MAX_BYTES` each, half of it for the contiguous copies that decoding on CPU keeps (see
    `DecodeWorkspace`). Raises `ConfigError` if not even one token fits.
    """
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, resolve_dtype(dtype, config))
    per_token = kv_bytes_per_token(config, kv_dtype, tp_size, pp_size)
    per_token += kv_bytes_per_token(config, "float32", tp_size, pp_size)
    share = int(available_host_bytes() * fraction) // (tp_size * pp_size)
    budget = min(share, CPU_MAX_BYTES)
    tokens = budget // per_token
    if tokens < 1:
        raise ConfigError(
            f"no room for a KV cache: {budget} bytes are free on cpu and one token takes "
            f"{per_token}. Free memory, raise tp_size or pp_size, or use a smaller model."
        )
    return tokens


def stage_weight_bytes(model: ModelConfig, dtype: str, parallel: ParallelState) -> int:
    """Bytes of one rank's matrices (norms and biases don't matter here)."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = model.hidden_size * (qkv + model.num_heads * model.head_dim)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    table = model.vocab_size * model.hidden_size
    tables = int(parallel.is_first_stage) + int(parallel.is_last_stage)
    if model.tie_word_embeddings:
        tables = min(tables, 1)
    layers = len(stage_layers(model.num_layers, parallel.pp_size)[parallel.pp_rank])
    numel = (layers * layer + tables * table) // parallel.tp_size
    return numel * resolve_dtype(dtype, model).itemsize


def kv_bytes_per_token(
    config: ModelConfig, dtype: torch.dtype | str, tp_size: int, pp_size: int
) -> int:
    """KV cache bytes per token on the worker that holds most of it."""
    if isinstance(dtype, str):
        dtype = resolve_dtype(dtype, config)
    layers = max(len(stage) for stage in stage_layers(config.num_layers, pp_size))
    heads = local_kv_heads(config.num_kv_heads, tp_size)
    return MHATokenToKVPool.bytes_per_token(layers, heads, config.head_dim, dtype)
