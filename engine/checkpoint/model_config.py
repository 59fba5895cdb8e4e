"""What Manta needs to know of a checkpoint, read from its Hugging Face `config.json`.

It is read without transformers: the ingress and the config check must stay light to import.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.files import name_the_file
from engine.checkpoint.layout import AttentionCall, ModelLayout, read_layout
from engine.checkpoint.quantization import MODELOPT_NAME, read_format
from engine.checkpoint.quantized.base import CheckpointFormat
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError
from engine.registry import (
    LATENT_BACKENDS,
    MODELS,
    TRANSFORMERS,
    TRANSFORMERS_GATHERED,
    TRANSFORMERS_ROWS,
)

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""What transformers makes of `model_type`."""
_OLD_NAME = "LLaMAForCausalLM"
"""How the first Llama checkpoints were converted."""

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_LLAMA = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}
_MISTRAL = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
_QWEN2 = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": {**_QWEN2, "head_dim": 128, "attention_bias": False},
}
"""Values of keys that config.json lacks: those of transformers' configuration classes."""

_ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""What each kind of RoPE scaling needs."""


_THROUGH_TRANSFORMERS = {
    "flat": TRANSFORMERS,
    "rows": TRANSFORMERS_ROWS,
    "gathered": TRANSFORMERS_GATHERED,
}
"""Words of `MODELS` by `ModelLayout.mode`."""
_NO_ATTENTION = AttentionCall(num_heads=1, num_kv_heads=1, k_dim=64, v_dim=64, scale=1.0)
"""Heads of a model whose layers make no attention call: its tokens have no keys and values."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and, if any, the scaling rule with its parameters."""

    theta: float = 10000.0
    rope_type: str = "default"
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only model. Sizes in elements, lengths in tokens."""

    path: Path
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, None for full attention."""
    dtype: str
    eos_token_ids: tuple[int, ...]
    layout: ModelLayout | None = None
    """Of a model that transformers' code computes; None: ours does."""
    quantized: CheckpointFormat | None = None
    """How the checkpoint's matrices are quantized; None: they are plain."""

    @property
    def calls(self) -> tuple[AttentionCall, ...]:
        """The attention calls of a forward, in order, with the heads of the whole model."""
        if self.layout is not None:
            return self.layout.calls
        sizes = self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim
        return tuple(
            AttentionCall(*sizes, self.head_dim**-0.5, window, layer=layer, is_divided=True)
            for layer, window in enumerate(self.layer_windows)
        )

    def for_backend(self, attention_backend: str) -> ModelConfig:
        """The model as it runs with an attention backend: over latents if that knows them, which
        take least of the KV cache; otherwise over the keys and values that they stand for."""
        if self.layout is None or not self.layout.calls or attention_backend in LATENT_BACKENDS:
            return self
        layout = self.layout.expanded
        sizes = layout.calls[0].num_kv_heads, layout.calls[0].k_dim
        return replace(self, layout=layout, num_kv_heads=sizes[0], head_dim=sizes[1])

    @property
    def title(self) -> str:
        """Architecture and whose code it is, for a person."""
        if self.layout is None:
            return self.architecture
        return f"{self.layout.class_name}, by transformers"

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep states of requests beside keys and values."""
        return self.layout is not None and bool(self.layout.states)

    def state_bytes(self, item: int) -> int:
        """Bytes of one request's states, where the model's numbers have `item` bytes."""
        return 0 if self.layout is None else self.layout.state_bytes(item)

    def check_split(self, tp_size: int, pp_size: int, ep_size: int | None = None) -> None:
        """Raise `ConfigError` unless the model can be divided over this many ranks. `ep_size` as in
        the configuration."""
        if self.keeps_states and (tp_size > 1 or pp_size > 1):
            raise ConfigError(
                f"{self.title}, keeps states of requests beside attention, which can't "
                "be divided yet; set tp_size: 1 and pp_size: 1."
            )
        if self.layout is not None:
            self.layout.check_split(tp_size, self.stage_layers(pp_size), ep_size)
        if pp_size > max(self.num_layers, 1):
            raise ConfigError(f"pp_size ({pp_size}) exceeds the model's {self.num_layers} layers.")
        if self.layout is not None:
            return
        if ep_size is not None:
            raise ConfigError(
                f"ep_size divides the experts of a mixture, and {self.architecture} has none; "
                "leave it out."
            )
        for call in self.calls:
            call.check_ranks(tp_size)
        if self.intermediate_size % tp_size:
            raise ConfigError(
                f"tp_size ({tp_size}) must divide the model's intermediate size "
                f"{self.intermediate_size}."
            )

    def auto_dtype(self, device: str, *, cpu_has_bfloat16: bool) -> str:
        """What `dtype: auto` means on `device`. Without instructions for it, products in bfloat16
        take 2 to 5 times as long on a CPU as those in float32."""
        if device == "cuda":
            return "bfloat16" if self.dtype == "float32" else self.dtype
        return "bfloat16" if self.dtype == "bfloat16" and cpu_has_bfloat16 else "float32"

    def local_kv_heads(self, tp_size: int) -> int:
        """Key/value heads that each of `tp_size` ranks holds; several ranks may hold the same."""
        return max(1, self.num_kv_heads // tp_size)

    def layer_matrices(self, tp_size: int) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrices of a layer that each of `tp_size` ranks holds."""
        queries = self.num_heads // tp_size * self.head_dim
        keys = self.local_kv_heads(tp_size) * self.head_dim
        inner = self.intermediate_size // tp_size
        return (
            (queries + 2 * keys, self.hidden_size),
            (self.hidden_size, queries),
            (2 * inner, self.hidden_size),
            (self.hidden_size, inner),
        )

    def stage_layers(self, pp_size: int) -> list[range]:
        """Layers of each pipeline stage: as even as possible, the remainder to the first stages.

        (The last stage also has the output head.)
        """
        size, extra = divmod(self.num_layers, pp_size)
        starts = [stage * size + min(stage, extra) for stage in range(pp_size + 1)]
        return [range(starts[stage], starts[stage + 1]) for stage in range(pp_size)]

    @classmethod
    def from_pretrained(cls, path: str | Path, impl: str = "auto") -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the eos ids) of a model folder.

        `impl`: the configuration's `model_impl`. Raises `ConfigError` if the folder, the file or
        the model that it describes can't be served.
        """
        folder = Path(path)
        config = _read_json(folder, "config.json")
        architecture = None if impl == "transformers" else _architecture(folder, config, impl)
        if config.get("transformers_weights") is not None:
            raise ConfigError(
                f"{folder}/config.json names its weights in 'transformers_weights', which isn't "
                "supported; give the file the name model.safetensors and remove the key."
            )
        has_modelopt = (folder / MODELOPT_NAME).exists()
        modelopt = _read_json(folder, MODELOPT_NAME) if has_modelopt else None
        quantized = read_format(folder, config, modelopt)
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").exists():
            generation = _read_json(folder, "generation_config.json")
        if architecture is None:
            model = cls._from_layout(folder, read_layout(folder), generation)
        else:
            values = ConfigValues(folder / "config.json", config, _DEFAULTS[architecture])
            model = cls._from_values(folder, architecture, values, generation)
        return replace(model, quantized=quantized)

    @classmethod
    def _from_layout(
        cls, folder: Path, layout: ModelLayout, generation: dict[str, Any]
    ) -> ModelConfig:
        if layout.lacks:
            raise ConfigError(
                f"{folder} holds a {layout.class_name}, which needs {layout.lacks}: that isn't "
                "supported yet."
            )
        eos = layout.eos_token_ids
        if "eos_token_id" in generation:
            values = ConfigValues(folder / "generation_config.json", generation, {})
            eos = values.token_ids("eos_token_id")
        call = layout.calls[0] if layout.calls else _NO_ATTENTION
        return cls(
            path=folder,
            architecture=_THROUGH_TRANSFORMERS[layout.mode],
            hidden_size=layout.hidden_size,
            num_layers=layout.num_layers,
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.k_dim,
            intermediate_size=layout.hidden_size,
            vocab_size=layout.vocab_size,
            max_position_embeddings=layout.max_positions,
            rms_norm_eps=0.0,
            hidden_act="",
            rope=RopeConfig(),
            tie_word_embeddings=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            layer_windows=tuple(call.window for call in layout.calls),
            dtype=layout.dtype,
            eos_token_ids=eos,
            layout=layout,
        )

    @classmethod
    def _from_values(
        cls,
        folder: Path,
        architecture: str,
        config: ConfigValues,
        generation: dict[str, Any],
    ) -> ModelConfig:
        qwen2 = architecture == "Qwen2ForCausalLM"
        heads = config.size("num_attention_heads")
        hidden = config.size("hidden_size")
        num_layers = config.size("num_hidden_layers")
        max_positions = config.size("max_position_embeddings")
        has_bias = "attention_bias" in _DEFAULTS[architecture] and config.flag("attention_bias")
        eos = config.token_ids("eos_token_id")
        if "eos_token_id" in generation:
            eos = ConfigValues(folder / "generation_config.json", generation, {}).token_ids(
                "eos_token_id"
            )
        model = cls(
            path=folder,
            architecture=architecture,
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=config.optional_size("num_key_value_heads") or heads,
            head_dim=config.optional_size("head_dim") or hidden // heads,
            intermediate_size=config.size("intermediate_size"),
            vocab_size=config.size("vocab_size"),
            max_position_embeddings=max_positions,
            rms_norm_eps=config.number("rms_norm_eps"),
            hidden_act=config.text("hidden_act"),
            rope=_rope_config(config, max_positions),
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            qkv_bias=True if qwen2 else has_bias,
            o_bias=False if qwen2 else has_bias,
            mlp_bias="mlp_bias" in _DEFAULTS[architecture] and config.flag("mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            layer_windows=_layer_windows(architecture, config, num_layers),
            dtype=_dtype(config),
            eos_token_ids=eos,
        )
        if model.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act '{model.hidden_act}' is not supported; only silu is.")
        if model.num_heads % model.num_kv_heads:
            raise ConfigError(
                f"{model.num_heads} attention heads don't divide into {model.num_kv_heads} "
                "key/value heads."
            )
        return model


def _architecture(folder: Path, config: dict[str, Any], impl: str) -> str | None:
    """The architecture that config.json means; None: one that transformers may know. As there,
    `model_type` decides."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    kind = config.get("model_type")
    own = _MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if own is not None and name in ("", own, own.replace("ForCausalLM", "Model"), _OLD_NAME):
        return own  # `auto_map` is not needed then: the code is built in
    if kind is None and name in MODELS and "auto_map" not in config:
        return name
    if impl == "auto" and own is None and isinstance(kind, str):
        return None
    if "auto_map" in config:
        raise ConfigError(
            f"{folder}/config.json has 'auto_map': the checkpoint wants to run its own code, "
            "which Manta never does. Use a checkpoint of an architecture that is built in."
        )
    if name in MODELS:
        raise ConfigError(
            f"{folder}/config.json has architecture {name} and model_type {kind!r}, which don't "
            f"belong together; correct one of them. model_type is one of {', '.join(_MODEL_TYPES)}."
        )
    raise ConfigError(
        f"architecture {name or '(none named)'} of {folder} is not supported; supported are "
        f"{', '.join(word for word in MODELS if word not in _THROUGH_TRANSFORMERS)}, and with "
        "model_impl: auto what transformers knows."
    )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(
            f"model folder '{folder}' does not exist; set `model` to a folder with config.json, "
            "tokenizer files and *.safetensors, to a GGUF file, or to a hub id."
        )
    try:
        content = json.loads((folder / name).read_bytes())
    except FileNotFoundError as error:
        if any(folder.glob("*.gguf")):
            raise name_the_file(folder) from error
        raise ConfigError(
            f"'{folder}' has no {name}; is it a Hugging Face model? (A GGUF file of the hub is "
            "named as owner/name:Q4_K_M.)"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{folder / name} is not valid JSON: {error}. Download the file again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / name} must hold a JSON object.")
    return content


def _dtype(config: ConfigValues) -> str:
    # transformers >= 5 writes `dtype`, older versions `torch_dtype`.
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    return config.text(key).removeprefix("torch.")


def _rope_config(config: ConfigValues, max_positions: int) -> RopeConfig:
    # transformers >= 5 writes `rope_parameters`; older files `rope_theta` and `rope_scaling`. The
    # order of precedence is that of transformers.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    params = config.mapping(key)
    if any(isinstance(value, dict) for value in params.values()):
        raise config.error(key, "one mapping for all layers")
    inner = ConfigValues(config.path, {**config.given, **params}, {"rope_theta": 10000.0})
    theta = inner.number("rope_theta")
    rope_type = str(params.get("rope_type") or params.get("type") or "default")
    if rope_type not in _ROPE_PARAMETERS:
        raise ConfigError(
            f"RoPE scaling '{rope_type}' is not supported; default, linear and llama3 are."
        )
    if inner.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"{config.path}: partial_rotary_factor ({inner.get('partial_rotary_factor')}) is not "
            "supported; all of a head is rotated."
        )
    context = config.get("original_max_position_embeddings")
    if context is not None:
        params["original_max_position_embeddings"] = context
    params.setdefault("original_max_position_embeddings", max_positions)
    scaling = ConfigValues(config.path, params, {})
    return RopeConfig(
        theta, rope_type, {name: scaling.number(name) for name in _ROPE_PARAMETERS[rope_type]}
    )


def _layer_windows(
    architecture: str, config: ConfigValues, num_layers: int
) -> tuple[int | None, ...]:
    full = (None,) * num_layers
    window = config.optional_size("sliding_window")
    if architecture == "LlamaForCausalLM":
        if window is not None and window < config.size("max_position_embeddings"):
            raise ConfigError(
                f"{config.path}: a sliding_window ({window}) of {architecture} is not supported; "
                "set it to null if the model was trained without one."
            )
        return full
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if window is None or not config.flag("use_sliding_window"):
        return full
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.count("max_window_layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = {"full_attention": None, "sliding_attention": window}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or not all(kind in kinds for kind in layer_types)
    ):
        raise config.error("layer_types", f"{num_layers} times one of {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in layer_types)
