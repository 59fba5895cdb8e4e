"""A tiny model of any type that transformers knows, with random weights.

Rules set the keys by which configurations name a size. A few types need values of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 128
LENGTH = 272
"""Tokens."""


def _keys(**groups: Any) -> dict[str, Any]:
    """Values by key, from values by names that stand in one text."""
    return {name: value for value, names in groups.values() for name in names.split()}


_SIZES: dict[str, Any] = _keys(
    vocabulary=(
        VOCAB,
        "vocab_size unpadded_vocab_size vocab_size_per_layer_input audio_vocab_size",
    ),
    length=(
        LENGTH,
        "max_position_embeddings n_positions n_ctx max_seq_len seq_length "
        "original_max_position_embeddings",
    ),
    width=(
        64,
        "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim "
        "attention_hidden_size rwkv_hidden_size lru_width keep_window_size",
    ),
    inner=(
        96,
        "intermediate_size ffn_dim n_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim "
        "ffn_hidden_size intermediate_size_mlp dense_intermediate_size "
        "prefix_dense_intermediate_size",
    ),
    shared_inner=(
        48,
        "shared_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size",
    ),
    expert_inner=(32, "moe_intermediate_size expert_ffn_hidden_size"),
    layers=(4, "num_hidden_layers n_layer num_layers n_layers"),
    half_layers=(3, "decoder_layers encoder_layers num_decoder_layers num_encoder_layers"),
    heads=(
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads linear_num_value_heads linear_num_heads",
    ),
    kv_heads=(
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads "
        "n_mamba_heads",
    ),
    head=(
        16,
        "head_dim swa_head_dim kv_channels dim_head attention_head_dim v_head_dim "
        "qk_nope_head_dim kv_lora_rank o_lora_rank index_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim mamba_headdim "
        "query_pre_attn_scalar local_attention rel_extent",
    ),
    wide_head=(32, "global_head_dim"),
    low_rank=(24, "q_lora_rank qk_head_dim"),
    small=(
        8,
        "qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank adapter_rank d_rel "
        "gated_norm_rank num_centroids index_n_heads index_topk max_patch_length",
    ),
    window=(
        8,
        "sliding_window sliding_window_size window_size attention_chunk_size "
        "attention_window_size block_size chunk_size mamba_chunk_size",
    ),
    experts=(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    chosen=(
        2,
        "num_experts_per_tok moe_topk moe_k top_k_experts zero_expert_num "
        "centroid_intermediate_top_k o_groups num_codebooks index_topk_blocks",
    ),
    one=(
        1,
        "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group "
        "first_k_dense_replace num_dense_layers moe_layer_start_index num_kv_shared_layers "
        "num_global_key_value_heads index_local_blocks num_layers_per_stack H_cycles "
        "mamba_n_groups mamba_ngroups n_groups bos_token_id cls_token_id "
        "decoder_start_token_id attn_layer_offset expert_layer_offset",
    ),
    state=(16, "mamba_d_state ssm_state_size state_size"),
    state_heads=(8, "mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank"),
    kernel=(
        4,
        "mamba_d_conv conv_kernel linear_conv_kernel_dim short_conv_kernel_size "
        "conv_kernel_size index_block_size hc_sinkhorn_iters prompt_length",
    ),
    doubled=(
        2,
        "mamba_expand expand expansion_ratio eos_token_id sep_token_id eod_token_id "
        "type_vocab_size L_cycles attn_layer_period expert_layer_period full_attn_every",
    ),
    inner_state=(128, "mamba_d_ssm"),
    none=(0, "pad_token_id num_mtp_layers num_nextn_predict_layers encoder_no_repeat_ngram_size"),
    spread=(0.12, "initializer_range init_std"),
    absent=(None, "depth_decoder_config quantization_config"),
)
_SCALES: dict[str, float] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.8,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "scale_emb": 3,
    "scale_depth": 1.4,
    "logit_scale": 0.25,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 1.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.1,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
    "routed_scaling_factor": 1.5,
    "learnable_sink_init": 0.5,
    "attention_value_scale": 0.7,
    "logits_mup_width_multiplier": 2.0,
}
"""Set to what is noticed if it is left out."""

_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": None}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "model_type": "gemma4_text",
}
_ALL_SHARED = {
    **_GEMMA4,
    "num_kv_shared_layers": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_ZAMBA = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", *["linear_attention", "hybrid"] * 2],
    "attention_head_dim": 32,
    "attention_hidden_size": 128,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_MUSIC: dict[str, Any] = {
    "text_encoder": {"model_type": "t5", "d_model": 32, "num_layers": 1, "vocab_size": VOCAB},
    "audio_encoder": {"model_type": "encodec", "num_filters": 4, "hidden_size": 32},
}
_OWN: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _MROPE, "sliding_attention": _MROPE}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 64,
            "ffn_act_fn": {"name": "silu"},
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "dots3_note": {"vision_config": {"num_hidden_layers": 42}},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 24},
    "falcon": {"num_kv_heads": 4},
    "gemma3_text": _SLIDING,
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95] + [0.0] * 4,
        "intermediate_size": [96] * 5,
    },
    "gemma4_assistant": {"text_config": _ALL_SHARED},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4 | {"model_type": "gemma4_unified_text"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gpt_oss": {"layer_types": None},
    "granitemoehybrid": _LINEAR,
    "lfm2": {**_CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONV,
    "llama4_text": {
        "no_rope_layer_interval": 2,
        "floor_scale": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "mamba2": {"num_heads": 8},
    "minicpm3": {"dim_model_base": 64},
    "mpt": {"attn_config": None},
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "olmo_hybrid": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "roc_bert": {
        "shape_vocab_size": 16,
        "pronunciation_vocab_size": 16,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xlnet": {"d_head": 16, "d_inner": 96},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "num_mem_blocks": 1, "time_step_min": 1e-9},
    "zaya": {"num_experts_per_tok": 1},
    # It and Zamba 2 bound steps of time in chunks, and not in decodes.
    "nemotron_h": {"time_step_min": 1e-9},
}
_PICTURE: dict[str, int] = {
    "hidden_size": 32,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "adapter_out_dim": 64,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "depth": 1,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 32,
    "crop_size": 32,
    "patch_size": 16,
    "num_channels": 3,
    "conv_num_channels": 16,
    "out_hidden_size": 64,
    "mlp_ratio": 2,
    "ext_pw_out_channel": 32,
    "nemo_conv_channels": 32,
}
"""Of the parts that see and hear."""
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_KEPT = frozenset(("A_log", "D", "dt_bias", "A", "time_decay", "time_first"))
"""Parameters of recurrences that mean something as they are made."""


def tiny_config(kind: str) -> Any:
    """The configuration of a tiny model of this `model_type`."""
    made: Any = CONFIG_MAPPING[kind]
    names = _fields(made)
    own = _OWN.get(kind, {})
    parts = _parts(made, own)
    if "text_config" in names:
        ids = {key: _SIZES[key] for key in names if key in _SIZES and key.endswith("token_id")}
        return made(**ids, **parts)
    values = _values(made, kind) | own | parts
    if "is_decoder" in names:
        values["is_decoder"] = True
    for key in (key for key in _KINDS if key in names and key not in own):
        values |= _all_kinds(made, values, key)
    return made(**values)


def tiny_model(config: Any) -> PreTrainedModel:
    """The model of a configuration, float32, with weights by which greedy choices depend on the
    whole context."""
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    made = made[0] if isinstance(made, tuple) else made
    if made.config_class is not None and not isinstance(config, made.config_class):
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    model: PreTrainedModel = made(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1] in _KEPT:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 0.9 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * (0.1 if "norm" in name.lower() else 0.05))
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    model.tie_weights()
    return model


def _fields(made: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(made)}


def _values(made: Any, kind: str) -> dict[str, Any]:
    """Keys of a text model's configuration class."""
    names = _fields(made)
    values = {key: value for key, value in {**_SIZES, **_SCALES}.items() if key in names}
    if "kv_lora_rank" in names:
        values |= {"num_key_value_heads": 4, "head_dim": _SIZES["qk_rope_head_dim"]}
    return {key: value for key, value in values.items() if key in names} | _OWN.get(kind, {})


def _parts(made: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Keys of each configuration within one of several parts; `own` has those of its type."""
    parts: dict[str, Any] = {}
    for name, kind in (getattr(made, "sub_configs", None) or {}).items():
        if name in ("attn_config", "ffn_config"):
            continue
        given = own.get(name, {})
        if "model_type" in given:
            kind = CONFIG_MAPPING[given["model_type"]]
        part = kind if dataclasses.is_dataclass(kind) else type(getattr(made(), name, None))
        if not dataclasses.is_dataclass(part):
            continue
        known = _fields(part)
        if "vision" in name or "audio" in name:
            sizes = {key: value for key, value in _PICTURE.items() if key in known}
        else:
            sizes = _values(part, part.model_type)
        kind_of_part = {"model_type": part.model_type} if part.model_type else {}
        parts[name] = sizes | given | kind_of_part
    return parts


def _all_kinds(made: Any, values: dict[str, Any], key: str) -> dict[str, Any]:
    """`key` with each kind of layer that a model of usual size has, by turns; {} if a few layers
    have them all, or the configuration doesn't take it."""
    have = getattr(made(**values), key, None)
    kinds = list(dict.fromkeys(getattr(made(), key, None) or ()))
    if not have or set(have) >= set(kinds):
        return {}
    kinds = kinds[::-1] if kinds[0] == "full_attention" else kinds
    wanted = {key: [kinds[number % len(kinds)] for number in range(len(have))]}
    try:
        made(**values, **wanted)
    except Exception:  # each class checks in its own way; the layers stay as they were
        return {}
    return wanted
