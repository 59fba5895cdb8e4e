"""GGUF files made of small models by the `gguf` package, as llama.cpp's converter makes them, and a
place for what Manta makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from engine.checkpoint.gguf.rope import llama3_factors

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
"""By `model_type` of config.json."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_K_BLOCKS = {Kind.Q4_K: (144, (0, 2)), Kind.Q5_K: (176, (0, 2)), Kind.Q6_K: (210, (208,))}
"""Bytes of a block, and where its float16 are."""


def write_gguf(
    file: Path,
    folder: Path,
    kind: Kind | Callable[[str], Kind] = Kind.Q8_0,
    *,
    tokenizer: Path | None = None,
    metadata: dict[str, Any] | None = None,
    num_files: int = 1,
) -> Path:
    """Write the model of `folder` as `file`, with its matrices in `kind` (of the tensor's name).

    Returns a folder beside it, with what these matrices are after that in float32. `tokenizer`:
    a folder with tokenizer.json. `metadata` replaces keys; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: weight.float().numpy()
        for part in sorted(folder.glob("*.safetensors"))
        for name, weight in load_file(part).items()
    }
    arch = ARCHITECTURES[config["model_type"]]
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(
        file, name, split_max_tensors=-(-len(weights) // num_files) if num_files > 1 else 0
    )
    keys = {**_config_keys(name, config), **_tokenizer_keys(tokenizer, config), **(metadata or {})}
    for key, value in keys.items():
        if value is not None:
            _add(writer, key, value)
    kept: dict[str, torch.Tensor] = {}
    for tensor, whole, restore in _tensors(arch, config, weights):
        wanted = kind if isinstance(kind, Kind) else kind(tensor)
        stored = _quantized(whole, wanted if whole.ndim > 1 else Kind.F32)
        writer.add_tensor(tensor, stored[0], raw_dtype=stored[1])
        kept |= restore(gguf.quants.dequantize(*stored).reshape(whole.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    beside = file.with_suffix(".reference")
    beside.mkdir()
    save_file({n: t.contiguous() for n, t in kept.items()}, beside / "model.safetensors")
    (beside / "config.json").write_text((folder / "config.json").read_text())
    return beside


def write_random_gguf(file: Path, config: dict[str, Any], kind: Kind) -> None:
    """Write a Llama of random blocks: a large one takes neither time nor memory. `config` is what
    config.json would say; `kind` has one scale for a block, in its first two bytes."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in (_config_keys("llama", config) | _tokenizer_keys(None, config)).items():
        if value is not None:
            _add(writer, key, value)
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    matrices = {
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, hidden), "output": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        named = matrices | {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in named.items()}
    shapes["output_norm"] = (hidden,)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        blocks = generator.integers(0, 256, (shape[0], shape[1] // numbers, size), np.uint8)
        blocks[:, :, :2] = np.array([0.002], "<f2").view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    arch: gguf.MODEL_ARCH, config: dict[str, Any], weights: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, Callable[[np.ndarray], dict[str, torch.Tensor]]]]:
    """Name and content of each tensor, and what makes the weights of transformers of it."""
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    experts: dict[tuple[str, str], list[str]] = {}
    is_gemma = config["model_type"].startswith("gemma")
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config.get("num_key_value_heads"),
    }
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        head_dim = config.get("head_dim") or (
            config["hidden_size"] // config["num_attention_heads"]
        )
        factors = llama3_factors(
            rope["rope_theta"],
            head_dim // 2,
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
        yield "rope_freqs.weight", factors.astype(np.float32), lambda _: {}
    for name, weight in weights.items():
        expert = _EXPERT.fullmatch(name)
        if expert:
            experts.setdefault((expert[1], expert[3]), []).append(name)
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        inner = found.split(".")[-2]
        if arch == gguf.MODEL_ARCH.LLAMA and inner in heads:
            count = heads[inner]
            yield found, _paired(weight, count), lambda w, n=name, c=count: {n: _halved(w, c)}
        elif is_gemma and found.endswith("norm.weight"):
            yield found, weight + 1, lambda w, n=name: {n: torch.from_numpy(w - 1)}
        elif inner == "ffn_gate_inp_shexp":
            yield found, weight[0], lambda w, n=name: {n: torch.from_numpy(w[None])}
        else:
            yield found, weight, lambda w, n=name: {n: torch.from_numpy(w.copy())}
    for (prefix, matrix), parts in experts.items():
        parts.sort(key=lambda part: int(part.split(".")[-3]))
        found = names.get_name(f"{prefix}.{matrix}.weight", try_suffixes=(".weight",))
        assert found is not None, (prefix, matrix)
        stacked = np.stack([weights[part] for part in parts])
        yield (
            found,
            stacked,
            lambda w, p=tuple(parts): {n: torch.from_numpy(w[i].copy()) for i, n in enumerate(p)},
        )


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter permutes what is rotated."""
    rest = weight.shape[1:]
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *rest)
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def _halved(weight: np.ndarray, heads: int) -> torch.Tensor:
    rest = weight.shape[1:]
    back = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *rest).swapaxes(1, 2)
    return torch.from_numpy(back.reshape(weight.shape).copy())


def _quantized(weight: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    weight = np.ascontiguousarray(weight, np.float32)
    if kind not in _K_BLOCKS:
        return gguf.quants.quantize(weight, kind), kind
    # The package can't make these. Random blocks do, with scales that give numbers of this size.
    size, places = _K_BLOCKS[kind]
    rows = weight.reshape(-1, weight.shape[-1])
    generator = np.random.default_rng(rows.shape[0] * 1000 + rows.shape[1])
    blocks = generator.integers(0, 256, (rows.shape[0], rows.shape[1] // 256, size), np.uint8)
    unit = float(weight.std()) / (640 if kind == Kind.Q6_K else 32 * 2 ** (kind == Kind.Q5_K) * 6)
    for place in places:
        noise = generator.uniform(0.5, 1.5, blocks.shape[:2]) * unit * (8 if place == 2 else 1)
        blocks[:, :, place : place + 2] = noise.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1), kind


def _config_keys(name: str, config: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    rope = config.get("rope_parameters") or {}
    keys["rope.freq_base"] = (rope.get("full_attention") or rope).get("rope_theta", 10000.0)
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"]}
        keys |= {"attention.value_length": config["head_dim"]}
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        keys["expert_feed_forward_length"] = config.get("moe_intermediate_size")
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            keys[key] = config[key]
    return {f"{name}.{key}": value for key, value in keys.items()}


def _tokenizer_keys(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Of a byte-level tokenizer.json, or of a vocabulary of nothing but bytes."""
    size = config["vocab_size"]
    if folder is None:
        letters = ["a", "b", "ab", *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"a", "b"})]
        tokens = [*letters, *(f"<unused{n}>" for n in range(size))][:size]
        types = [1 if token in letters else 5 for token in tokens]
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": 2,
        }
    made = json.loads((folder / "tokenizer.json").read_text())
    named = json.loads((folder / "tokenizer_config.json").read_text())
    ids = dict(made["model"]["vocab"])
    types = dict.fromkeys(ids.values(), 1)
    for token in made["added_tokens"]:
        ids[token["content"]] = token["id"]
        types[token["id"]] = 3 if token["special"] else 4
    by_id = {number: token for token, number in ids.items()}
    merges = [m if isinstance(m, str) else " ".join(m) for m in made["model"]["merges"]]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [by_id.get(n, f"[PAD{n}]") for n in range(size)],
        "tokenizer.ggml.token_type": [types.get(n, 5) for n in range(size)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": named.get("chat_template"),
    }
    for key, word in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id")):
        if named.get(key):
            keys[f"tokenizer.ggml.{word}"] = ids[named[key]]
    return keys


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def keep_folders_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make model folders there, and not in the user's folder for caches."""
    patch.setattr("engine.checkpoint.gguf.folder.cache_folder", lambda: folder)
