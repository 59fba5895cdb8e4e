"""LoRA adapters in PEFT's format with random matrices, and models into which they are merged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.layers.experts import is_experts

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: nn.Module,
    *,
    rank: int = 8,
    targets: Iterable[str] = ALL,
    seed: int = 0,
    size: float = 0.5,
    inside: str = "",
    experts: str = "",
    **config: Any,
) -> Path:
    """Write an adapter for the linears of `model` whose names end in one of `targets`, and contain
    `inside`. What it adds has about `size` times the numbers of the model's own matrices. `config`
    is what its adapter_config.json says besides; ranks follow `rank_pattern`. `experts`: how it has
    matrices for those of mixtures, "single", "all" or "exchanged" (PEFT before 0.18.1)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    ranks: dict[str, int] = config.get("rank_pattern") or {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets or inside not in name:
            continue
        if not isinstance(module, nn.Linear):
            continue
        out_size, in_size = module.weight.shape
        own = next((r for end, r in ranks.items() if name.endswith(end)), rank)
        prefix = f"base_model.model.{name}"
        a = torch.randn((own, in_size), generator=generator)
        b = torch.randn((out_size, own), generator=generator)
        by = size * float(module.weight.detach().float().std()) / own**0.5
        tensors[f"{prefix}.lora_A.weight"] = a
        tensors[f"{prefix}.lora_B.weight"] = b * by
    for name, module in model.named_modules():
        if experts and is_experts(module):
            tensors |= {
                f"base_model.model.{key}": value
                for key, value in _of_experts(name, module, rank, experts, size, generator).items()
            }
            if experts != "single":
                config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    assert tensors, "the model has no such linears"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merge(model: nn.Module, folder: Path) -> nn.Module:
    """Add an adapter to the weights of `model`, in place: W + s B A, as PEFT's documents say."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name in {key.split(".lora_")[0] for key in tensors}:
            a, b = (tensors[f"{name}.lora_{side}.weight"].double() for side in "AB")
            linear = name.removeprefix("base_model.model.")
            rank = _of(config.get("rank_pattern"), linear, config["r"])
            alpha = _of(config.get("alpha_pattern"), linear, config["lora_alpha"])
            scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
            if "experts" in linear.split("."):
                _merge_experts(model, linear, a, b, scale, rank)
                continue
            weight: Any = model.get_submodule(linear).weight
            weight += (scale * (b @ a)).to(weight.dtype)
    return model


def _of_experts(
    name: str, module: Any, rank: int, form: str, size: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    found = {}
    for key in ("gate_up_proj", "down_proj"):
        whole = getattr(module, key)
        count, out_size, in_size = whole.shape
        if module.is_transposed:
            out_size, in_size = in_size, out_size
        by = size * float(whole.detach().float().std()) / rank**0.5

        def pair(prefix: str, given: int, made: int, ranks: int, by: float = by) -> None:
            a = torch.randn((ranks, given), generator=generator)
            b = torch.randn((made, ranks), generator=generator) * by
            found[f"{prefix}.lora_A.weight"], found[f"{prefix}.lora_B.weight"] = a, b

        if form == "single":
            for number in range(0, count, 2):  # an adapter need not have all
                if key == "down_proj":
                    pair(f"{name}.{number}.down_proj", in_size, out_size, rank)
                else:
                    pair(f"{name}.{number}.gate_proj", in_size, out_size // 2, rank)
                    pair(f"{name}.{number}.up_proj", in_size, out_size // 2, rank)
            continue
        prefix = name if key == "down_proj" else f"{name}.base_layer"
        sizes = (out_size, in_size) if form == "exchanged" else (in_size, out_size)
        pair(prefix, *sizes, rank * count)
    return found


def _merge_experts(
    model: nn.Module, linear: str, a: torch.Tensor, b: torch.Tensor, scale: float, rank: int
) -> None:
    """`ParamWrapper.get_delta_weight` of PEFT; for single experts W + s B A."""
    words = linear.split(".")
    at = words.index("experts")
    module: Any = model.get_submodule(".".join(words[: at + 1]))
    if words[-1] in ("gate_proj", "up_proj", "down_proj"):
        assert not module.is_transposed
        whole = module.down_proj if words[-1] == "down_proj" else module.gate_up_proj
        half = whole.shape[1] // 2
        rows = {"gate_proj": slice(half), "up_proj": slice(half, None)}.get(words[-1], slice(None))
        whole[int(words[-2]), rows] += (scale * (b @ a)).to(whole.dtype)
        return
    count = module.num_experts
    assert len(a) == rank * count
    a, b = a.reshape(count, rank, -1), b.reshape(len(b), rank, count)
    delta = scale * torch.einsum("ore,eri->eoi", b, a)
    for whole in (module.gate_up_proj, module.down_proj):
        shape = tuple(whole.shape)
        as_out_in = shape if not module.is_transposed else (shape[0], shape[2], shape[1])
        if tuple(delta.shape) == as_out_in:
            whole += (delta.mT if module.is_transposed else delta).to(whole.dtype)
            return
        if tuple(delta.mT.shape) == as_out_in:
            assert not module.is_transposed
            whole += delta.mT.to(whole.dtype)
            return
    raise AssertionError(f"no parameter of {linear} has the sizes {tuple(delta.shape)}")


def _of(pattern: dict[str, Any] | None, linear: str, otherwise: Any) -> Any:
    return next((v for end, v in (pattern or {}).items() if linear.endswith(end)), otherwise)
