"""Tiny random-weight models of every supported architecture, for comparison with transformers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig, ResolvedConfig, WorkerConfig
from engine.device.distributed import ParallelState

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3-tied": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}
"""All that Manta serves, with `make_model`'s arguments."""


THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.8,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "config_name": "Gemma3TextConfig",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
}
"""Some that transformers' code computes, each with something that Llama lacks."""

DIVISIBLE_HEADS: dict[str, dict[str, Any]] = {
    "granite": {"vocab_size": 212},
    "phi3": {"tie_word_embeddings": True},
    "gpt_neox": {"vocab_size": 212},
    "gemma3": {"vocab_size": 212, "tie_word_embeddings": True},
    "qwen3_moe": {"vocab_size": 212},
}
"""Keys with which ranks can divide the outputs of some heads, tied ones among them."""


def make_model(
    folder: Path,
    arch: str,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    config_name: str = "",
    **overrides: Any,
) -> Path:
    """Write a model of architecture `arch` (e.g. "LlamaForCausalLM"), without a tokenizer.

    `overrides` are config.json keys. The weights are large enough that greedy choices have
    margins far above float32 noise and depend on the whole context.
    """
    import transformers  # slow to import, and processes that only load models don't need it

    config_name = config_name or arch.removesuffix("ForCausalLM") + "Config"
    config_class = getattr(transformers, config_name)
    config = config_class(**{**_SMALL, **overrides})
    config.dtype = "float32"
    model = getattr(transformers, arch)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.ndim < 2 or name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (2.0 / parameter.shape[1] ** 0.5))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_config(
    folder: Path | str, parallel: ParallelState | None = None, **changes: Any
) -> WorkerConfig:
    """A worker's configuration on CPU with sizes for tests; `changes` as in `changed`."""
    parallel = parallel or ParallelState.single()
    engine = EngineConfig(
        page_size=1,
        max_running_requests=8,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
    )
    config = WorkerConfig(
        ResolvedConfig(engine, ModelConfig.from_pretrained(folder), 256, "last"),
        "float32",
        "cpu",
        num_kv_tokens=1024,
        max_kv_tokens=1024,
        max_step_tokens=512,
        kernels=engine.kernel_choice("torch"),
        cpu_threads=1,
    )
    return changed(config, **changes)


def changed(config: WorkerConfig, **changes: Any) -> WorkerConfig:
    """`config` with other fields of its own, of its model's resolution, or keys of its engine.
    What `EngineConfig.resolve` would refuse isn't refused."""
    own = {field.name for field in fields(WorkerConfig)}
    of_resolved = {key: changes[key] for key in ("model", "max_model_len") if key in changes}
    of_engine = {k: v for k, v in changes.items() if k not in own and k not in of_resolved}
    engine = config.engine.model_copy(update=of_engine)
    assert of_engine.keys() <= EngineConfig.model_fields.keys(), of_engine
    changes.setdefault("kernels", engine.kernel_choice(config.kernels.layers))
    resolved = replace(config.resolved, engine=engine, **of_resolved)
    return replace(config, resolved=resolved, **{k: changes[k] for k in changes if k in own})
