"""Tiny random-weight models of every supported architecture, for comparison with transformers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
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
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
            "sliding_window": 24,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "config_name": "Llama4TextConfig",
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0, 1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            "config_name": "Gemma4TextConfig",
            "head_dim": 8,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 211,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
"""Some that transformers' code computes, each with something that Llama lacks."""

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

WITH_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "residual_multiplier": 0.8,
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_DELTA_NET, **_EXPERTS, "head_dim": 16}),
    "qwen3_5": (
        "Qwen3_5ForCausalLM",
        {**_DELTA_NET, "config_name": "Qwen3_5TextConfig", "head_dim": 16},
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {**_DELTA_NET, "linear_num_key_heads": 4}),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "full_attn_idxs": None,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "chunk_size": 8,
            "time_step_min": 1e-9,  # bounds chunks, and not decodes: both can't be compared else
        },
    ),
    "mamba": ("MambaForCausalLM", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    ),
}
"""Some that keep states of requests beside attention, each in a way of its own."""
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
        swa_full_tokens_ratio=1.0,  # otherwise only a scheduler's steps say what is where
        ep_size=parallel.ep_size,
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


def leave_ranks_alone(patch: pytest.MonkeyPatch) -> None:
    """Ranks that are loaded here have no others: what these would add is not there."""
    patch.setattr(ParallelState, "all_reduce", lambda self, x: x)
    patch.setattr(
        ParallelState, "all_gather_last_dim", lambda self, x: torch.cat([x] * self.tp_size, -1)
    )
