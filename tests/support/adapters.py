"""LoRA adapters in PEFT's format with random matrices, and models into which they are merged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

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
    **config: Any,
) -> Path:
    """Write an adapter for the linears of `model` whose names end in one of `targets`, and contain
    `inside`. What it adds has about `size` times the numbers of the model's own matrices. `config`
    is what its adapter_config.json says besides; ranks follow `rank_pattern`."""
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
            weight: Any = model.get_submodule(linear).weight
            weight += (scale * (b @ a)).to(weight.dtype)
    return model


def _of(pattern: dict[str, Any] | None, linear: str, otherwise: Any) -> Any:
    return next((v for end, v in (pattern or {}).items() if linear.endswith(end)), otherwise)
