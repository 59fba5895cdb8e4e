"""What Manta needs to know of a checkpoint, read from its Hugging Face `config.json`.

It is read without transformers: the ingress and the config check must stay light to import.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.quantization import refuse_quantized
from engine.registry import MODELS


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
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def check_split(self, tp_size: int, pp_size: int) -> None:
        """Raise `ConfigError` unless the model can be divided over this many ranks."""
        if self.num_heads % tp_size:
            raise ConfigError(
                f"tp_size ({tp_size}) must divide the model's {self.num_heads} attention heads."
            )
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ConfigError(
                f"tp_size ({tp_size}) must divide the model's {self.num_kv_heads} key/value heads, "
                "or be a multiple of them."
            )
        if self.intermediate_size % tp_size:
            raise ConfigError(
                f"tp_size ({tp_size}) must divide the model's intermediate size "
                f"{self.intermediate_size}."
            )
        if pp_size > self.num_layers:
            raise ConfigError(f"pp_size ({pp_size}) exceeds the model's {self.num_layers} layers.")

    def auto_dtype(self, device: str, *, cpu_has_bfloat16: bool) -> str:
        """What `dtype: auto` means on `device`. Without instructions for it, products in bfloat16
        take 2 to 5 times as long on a CPU as those in float32."""
        if device == "cuda":
            return "bfloat16" if self.dtype == "float32" else self.dtype
        return "bfloat16" if self.dtype == "bfloat16" and cpu_has_bfloat16 else "float32"

    def local_kv_heads(self, tp_size: int) -> int:
        """Key/value heads that each of `tp_size` ranks holds; several ranks may hold the same."""
        return max(1, self.num_kv_heads // tp_size)

    def stage_layers(self, pp_size: int) -> list[range]:
        """Layers of each pipeline stage: as even as possible, the remainder to the first stages.

        (The last stage also has the output head.)
        """
        size, extra = divmod(self.num_layers, pp_size)
        starts = [stage * size + min(stage, extra) for stage in range(pp_size + 1)]
        return [range(starts[stage], starts[stage + 1]) for stage in range(pp_size)]

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the eos ids) of a model folder.

        Raises `ConfigError` if the folder, the file or the model that it describes can't be served.
        """
        folder = Path(path)
        config = _read_json(folder, "config.json")
        if "auto_map" in config:
            raise ConfigError(
                f"{folder}/config.json has 'auto_map': the checkpoint wants to run its own code, "
                "which Manta never does. Use a checkpoint of a built-in architecture: "
                f"{', '.join(MODELS)}."
            )
        architectures = config.get("architectures") or []
        architecture = architectures[0] if architectures else "(none named)"
        if architecture not in MODELS:
            raise ConfigError(
                f"architecture {architecture} of {folder} is not supported; "
                f"supported are {', '.join(MODELS)}."
            )
        modelopt = "hf_quant_config.json"
        refuse_quantized(
            folder, config, _read_json(folder, modelopt) if (folder / modelopt).exists() else None
        )
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").exists():
            generation = _read_json(folder, "generation_config.json")
        try:
            return cls._from_dicts(folder, architecture, config, generation)
        except KeyError as error:
            raise ConfigError(f"{folder}/config.json lacks the key {error}.") from error

    @classmethod
    def _from_dicts(
        cls, folder: Path, architecture: str, config: dict[str, Any], generation: dict[str, Any]
    ) -> ModelConfig:
        qwen2 = architecture == "Qwen2ForCausalLM"
        qwen3 = architecture == "Qwen3ForCausalLM"
        heads = int(config["num_attention_heads"])
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = 128 if qwen3 else int(config["hidden_size"]) // heads
        attention_bias = bool(config.get("attention_bias", False))
        num_layers = int(config["num_hidden_layers"])
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        if eos is None:
            eos = []
        model = cls(
            path=folder,
            architecture=architecture,
            hidden_size=int(config["hidden_size"]),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            hidden_act=str(config.get("hidden_act", "silu")),
            rope=_rope_config(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if qwen2 else attention_bias,
            o_bias=False if qwen2 else attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qwen3,
            layer_windows=_layer_windows(architecture, config, num_layers),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (int(eos),),
        )
        if model.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act '{model.hidden_act}' is not supported; only silu is.")
        if model.num_heads % model.num_kv_heads:
            raise ConfigError(
                f"{model.num_heads} attention heads don't divide into {model.num_kv_heads} "
                "key/value heads."
            )
        return model


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(
            f"model folder '{folder}' does not exist; set `model` to a folder with config.json, "
            "tokenizer files and *.safetensors, or to a hub id that is in the local cache."
        )
    try:
        content = json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        if any(folder.glob("*.gguf")):
            raise ConfigError(
                f"{folder} holds GGUF files, which Manta can't read. Use the model's safetensors "
                "checkpoint in bfloat16 or float16."
            ) from error
        raise ConfigError(f"'{folder}' has no {name}; is it a Hugging Face model?") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{folder / name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / name} must hold a JSON object.")
    return content


def _rope_config(config: dict[str, Any]) -> RopeConfig:
    # transformers >= 5 writes `rope_parameters`; older files `rope_theta` and `rope_scaling`.
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    rope_type = str(params.pop("rope_type", None) or params.pop("type", None) or "default")
    params.pop("type", None)
    if rope_type not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"RoPE scaling '{rope_type}' is not supported; default, linear and llama3 are."
        )
    return RopeConfig(theta, rope_type, params)


def _layer_windows(
    architecture: str, config: dict[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = int(config.get("max_window_layers", num_layers))
        layer_types = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
