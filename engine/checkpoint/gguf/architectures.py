"""The architectures that are read from GGUF files: their config.json and the names of their
tensors, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.checkpoint.gguf.checkpoint import GgufCheckpoint
from engine.checkpoint.gguf.header import GgufTensor
from engine.checkpoint.gguf.rope import rope_parameters
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError


class Target(NamedTuple):
    """Where a tensor belongs: `name` without the layer's prefix and without ".weight"."""

    name: str
    """With "{}": the tensor holds the weights of all experts."""
    heads: str = ""
    """Key with the number of heads whose rows the converter interleaved; "": it didn't."""
    is_row: bool = False
    """A matrix of one row, which the file has as a vector."""


_TOP = {
    "token_embd": Target("model.embed_tokens"),
    "output_norm": Target("model.norm"),
    "output": Target("lm_head"),
}
_ATTENTION = {
    "attn_norm": Target("input_layernorm"),
    "attn_q": Target("self_attn.q_proj"),
    "attn_k": Target("self_attn.k_proj"),
    "attn_v": Target("self_attn.v_proj"),
    "attn_output": Target("self_attn.o_proj"),
    "ffn_norm": Target("post_attention_layernorm"),
}
_HEAD_NORMS = {
    "attn_q_norm": Target("self_attn.q_norm"),
    "attn_k_norm": Target("self_attn.k_norm"),
}
_DENSE = {
    **_ATTENTION,
    "ffn_gate": Target("mlp.gate_proj"),
    "ffn_up": Target("mlp.up_proj"),
    "ffn_down": Target("mlp.down_proj"),
}
_INTERLEAVED = {
    "attn_q": Target("self_attn.q_proj", heads="attention.head_count"),
    "attn_k": Target("self_attn.k_proj", heads="attention.head_count_kv"),
}
_EXPERTS = {
    "ffn_gate_inp": Target("mlp.gate"),
    "ffn_gate_exps": Target("mlp.experts.{}.gate_proj"),
    "ffn_up_exps": Target("mlp.experts.{}.up_proj"),
    "ffn_down_exps": Target("mlp.experts.{}.down_proj"),
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": Target("mlp.shared_expert_gate", is_row=True),
    "ffn_gate_shexp": Target("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": Target("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": Target("mlp.shared_expert.down_proj"),
}
_GEMMA = {
    **_DENSE,
    "post_attention_norm": Target("post_attention_layernorm"),
    "ffn_norm": Target("pre_feedforward_layernorm"),
    "post_ffw_norm": Target("post_feedforward_layernorm"),
}

_QKV = ("attn_q", "attn_k", "attn_v")

_SCALES = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "expert_weights_scale",
)
"""Keys that change what is computed. An architecture that doesn't read them can't have them."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    name: str
    config: Callable[[GgufCheckpoint, Config], Config]
    """Makes config.json of what all architectures have in it, which is given."""
    layer: Mapping[str, Target]
    top: Mapping[str, Target] = field(default_factory=lambda: _TOP)
    biases: tuple[str, ...] = ()
    """Tensors of layers that may have a bias beside the weight."""
    norm_offset: float = 0.0
    """What the converter added to weights of norms."""
    keys: tuple[str, ...] = ()
    """Of `_SCALES`, with the architecture's name: those that `config` reads."""
    read_elsewhere: tuple[str, ...] = ("rope_freqs.weight",)
    """Tensors that say something of the configuration."""


def architecture_of(metadata: ConfigValues) -> Architecture:
    """Raises `ConfigError` if the file's architecture isn't known."""
    name = metadata.text("general.architecture")
    experts = metadata._replace(defaults={"llama.expert_count": 0}).count("llama.expert_count")
    key = "mixtral" if name == "llama" and experts else name
    if key not in _ARCHITECTURES:
        raise ConfigError(
            f"{metadata.path} holds a model of the architecture {name!r:.80}, which Manta can't "
            f"read from GGUF files; it reads {', '.join(_ARCHITECTURES)}. Use the model's "
            "safetensors checkpoint."
        )
    return _ARCHITECTURES[key]


def model_config(checkpoint: GgufCheckpoint) -> Config:
    """The content of config.json. Raises `ConfigError` if the metadata lacks something."""
    architecture, metadata = architecture_of(checkpoint.metadata), checkpoint.metadata
    for key in (f"{architecture.name}.{scale}" for scale in _SCALES):
        if key in architecture.keys:
            continue
        value = metadata.get(key)
        if value is not None and not (isinstance(value, int | float) and value in (0, 1)):
            raise ConfigError(
                f"{metadata.path} has the key '{key}', which Manta doesn't know of this "
                "architecture. Use the model's safetensors checkpoint."
            )
    causal = f"{architecture.name}.attention.causal"
    if metadata.get(causal) is not None and not metadata.flag(causal):
        raise ConfigError(f"{metadata.path} holds a model that doesn't generate ('{causal}').")
    return architecture.config(checkpoint, _common(architecture.name, checkpoint))


def _common(name: str, checkpoint: GgufCheckpoint) -> Config:
    metadata, tensors = checkpoint
    table = _tensor(checkpoint, "token_embd.weight")
    layers = metadata.size(f"{name}.block_count")
    if layers > len(tensors):
        raise metadata.error(f"{name}.block_count", "the number of its layers")
    hidden, heads = metadata.size(f"{name}.embedding_length"), _size(name, metadata, "head_count")
    head_dim = metadata.optional_size(f"{name}.attention.key_length") or max(1, hidden // heads)
    values = metadata.optional_size(f"{name}.attention.value_length")
    if values not in (None, head_dim):
        raise ConfigError(
            f"{metadata.path}: keys of {head_dim} numbers and values of {values} aren't supported."
        )
    rotated = metadata.optional_size(f"{name}.rope.dimension_count")
    if rotated not in (None, head_dim):
        raise ConfigError(
            f"{metadata.path}: {rotated} of {head_dim} numbers of a head are rotated, which Manta "
            "can't read from GGUF files; use the model's safetensors checkpoint."
        )
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.optional_size(f"{name}.feed_forward_length") or hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional_size(f"{name}.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size(f"{name}.context_length"),
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(name, head_dim, checkpoint),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(tensors),
    }


def _llama(checkpoint: GgufCheckpoint, common: Config) -> Config:
    window = checkpoint.metadata.optional_size("llama.attention.sliding_window")
    if window is not None:
        named = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        return {**common, **named, "sliding_window": window}
    return {
        **common,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": _has_bias(checkpoint, "attn_"),
        "mlp_bias": _has_bias(checkpoint, "ffn_"),
    }


def _has_bias(checkpoint: GgufCheckpoint, prefix: str) -> bool:
    return any(f".{prefix}" in name and name.endswith(".bias") for name in checkpoint.tensors)


def _mixtral(checkpoint: GgufCheckpoint, common: Config) -> Config:
    metadata = checkpoint.metadata
    return {
        **common,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": metadata.size("llama.expert_count"),
        "num_experts_per_tok": metadata.size("llama.expert_used_count"),
        "sliding_window": metadata.optional_size("llama.attention.sliding_window"),
    }


def _qwen2(checkpoint: GgufCheckpoint, common: Config) -> Config:
    return {**common, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(checkpoint: GgufCheckpoint, common: Config) -> Config:
    return {**common, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _qwen3_moe(checkpoint: GgufCheckpoint, common: Config) -> Config:
    metadata = checkpoint.metadata
    return {
        **common,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": metadata.size("qwen3moe.expert_count"),
        "num_experts_per_tok": metadata.size("qwen3moe.expert_used_count"),
        "moe_intermediate_size": metadata.size("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,  # the file doesn't say, and llama.cpp takes it so
    }


def _qwen2_moe(checkpoint: GgufCheckpoint, common: Config) -> Config:
    metadata = checkpoint.metadata
    shared = _tensor(checkpoint, "blk.0.ffn_up_shexp.weight")
    return {
        **common,
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": metadata.size("qwen2moe.expert_count"),
        "num_experts_per_tok": metadata.size("qwen2moe.expert_used_count"),
        "moe_intermediate_size": _tensor(checkpoint, "blk.0.ffn_up_exps.weight").shape[1],
        "shared_expert_intermediate_size": shared.shape[0],
        "norm_topk_prob": False,
    }


def _phi3(checkpoint: GgufCheckpoint, common: Config) -> Config:
    metadata = checkpoint.metadata
    window = metadata.optional_size("phi3.attention.sliding_window")
    original = metadata.optional_size("phi3.rope.scaling.original_context_length")
    return {
        **common,
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": original or common["max_position_embeddings"],
        "sliding_window": window,
        "pad_token_id": None,
    }


def _gemma2(checkpoint: GgufCheckpoint, common: Config) -> Config:
    metadata = checkpoint.metadata
    return {
        **common,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": metadata.size("gemma2.attention.sliding_window"),
        "attn_logit_softcapping": metadata.number("gemma2.attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("gemma2.final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_scale(common, large_layers=46),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(checkpoint: GgufCheckpoint, common: Config) -> Config:
    metadata, layers = checkpoint.metadata, common["num_hidden_layers"]
    every = metadata.optional_size("gemma3.attention.sliding_window_pattern") or 6
    local = "gemma3.rope.freq_base_swa"
    theta = 10000.0 if metadata.get(local) is None else metadata.number(local)
    return {
        **common,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": metadata.size("gemma3.attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": common["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        "query_pre_attn_scalar": _gemma_scale(common, large_layers=62),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma_scale(common: Config, large_layers: int) -> int:
    """What is divided by the root of: only the 27b models have another than the head's size. (So
    llama.cpp tells them, by the number of layers.)"""
    if common["num_hidden_layers"] == large_layers:
        return max(1, int(common["hidden_size"] // common["num_attention_heads"]))
    return int(common["head_dim"])


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """That of the matrices, or bfloat16 where they are quantized: most models were made in it."""
    kinds = {tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1}
    plain = {"F32": "float32", "F16": "float16"}
    return plain.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _size(name: str, metadata: ConfigValues, key: str) -> int:
    return metadata.size(f"{name}.attention.{key}")


def _tensor(checkpoint: GgufCheckpoint, name: str) -> GgufTensor:
    """A matrix that the configuration depends on."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None or len(tensor.shape) < 2:
        raise ConfigError(f"{checkpoint.metadata.path} lacks the matrix '{name}'.")
    return tensor


_ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        _llama,
        {**_DENSE, **_INTERLEAVED},
        biases=(*_QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    ),
    "mixtral": Architecture(
        "llama",
        _mixtral,
        {
            **_ATTENTION,
            **_INTERLEAVED,
            "ffn_gate_inp": Target("block_sparse_moe.gate"),
            "ffn_gate_exps": Target("block_sparse_moe.experts.{}.w1"),
            "ffn_down_exps": Target("block_sparse_moe.experts.{}.w2"),
            "ffn_up_exps": Target("block_sparse_moe.experts.{}.w3"),
        },
    ),
    "qwen2": Architecture("qwen2", _qwen2, _DENSE, biases=_QKV),
    "qwen2moe": Architecture(
        "qwen2moe", _qwen2_moe, {**_ATTENTION, **_EXPERTS, **_SHARED_EXPERT}, biases=_QKV
    ),
    "qwen3": Architecture("qwen3", _qwen3, {**_DENSE, **_HEAD_NORMS}),
    "qwen3moe": Architecture("qwen3moe", _qwen3_moe, {**_ATTENTION, **_HEAD_NORMS, **_EXPERTS}),
    "phi3": Architecture(
        "phi3",
        _phi3,
        {
            **_ATTENTION,
            "attn_qkv": Target("self_attn.qkv_proj"),
            "ffn_up": Target("mlp.gate_up_proj"),
            "ffn_down": Target("mlp.down_proj"),
        },
        read_elsewhere=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "gemma2": Architecture(
        "gemma2",
        _gemma2,
        _GEMMA,
        norm_offset=1.0,
        keys=("gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"),
    ),
    "gemma3": Architecture("gemma3", _gemma3, {**_GEMMA, **_HEAD_NORMS}, norm_offset=1.0),
}
