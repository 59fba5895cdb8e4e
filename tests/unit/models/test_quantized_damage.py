"""Damaged quantized checkpoints are refused in a sentence, before anything is read beyond them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.start.preflight import check_weights
from engine.errors import ConfigError
from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import SafetensorsSource
from tests.support.quantized import (
    Tensors,
    experts_float4,
    make_forms,
)

CPU = torch.device("cpu")
BASE = "model.layers.0.mlp.up_proj."
"""Of the matrix [48, 64] in all of these checkpoints."""
FORMS = make_forms()


def folder_of(name: str, folder: Path) -> Path:
    """A folder with one matrix of the form `name`, or a stack of experts'."""
    if name == "mxfp4":
        stack = torch.randn((2, 64, 48), generator=torch.Generator().manual_seed(0))
        blocks, scales = experts_float4(stack)
        tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
        described: dict[str, Any] = {"quant_method": "mxfp4"}
    else:
        form = FORMS[name]
        weight = torch.randn((48, 64), generator=torch.Generator().manual_seed(0))
        tensors = {BASE + key: value for key, value in form.pack(weight)[0].items()}
        described = form.config or {"quant_method": "modelopt", "quant_algo": "FP8"}
    save(folder, tensors)
    (folder / "config.json").write_text(json.dumps({"quantization_config": described}))
    return folder


def save(folder: Path, tensors: Tensors) -> None:
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")


def read_all(folder: Path) -> None:
    """What a start reads, and parts that ranks read."""
    check_weights(folder)
    source = SafetensorsSource(folder, torch.float32, CPU)
    stack = "experts.down_proj"
    name, shape = (stack, (2, 64, 48)) if stack in source.names() else (f"{BASE}weight", (48, 64))
    for dim in range(len(shape)):
        source.get(name, shape, dim=dim, start=shape[dim] // 2, count=shape[dim] // 2)
    source.read(name)
    source.quantized(MatrixSlice(BASE.rstrip("."), 48, 64, 0, 0, 48))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_all(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", [*FORMS, "mxfp4"])
def test_lost_tensors_are_named(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    read_all(folder)
    spared = ("input_scale", "weight_format", "g_idx", "weight_g_idx", "weight_zero_point")
    for lost in tensors:
        if lost.endswith(spared):
            continue
        save(folder, {key: value for key, value in tensors.items() if key != lost})
        message = refusal(folder)
        assert BASE in message or "experts.down_proj" in message, (lost, message)


def change(index: int) -> Callable[[random.Random, Tensors], None]:
    """One of the ways to damage tensors."""

    def pick(chance: random.Random, tensors: Tensors) -> str:
        return chance.choice(sorted(tensors))

    def shorten(chance: random.Random, tensors: Tensors) -> None:
        name = pick(chance, tensors)
        tensor = tensors[name]
        if tensor.ndim:
            dim = chance.randrange(tensor.ndim)
            size = tensor.shape[dim]
            tensors[name] = tensor.narrow(dim, 0, chance.choice([0, size // 2, max(size - 1, 0)]))

    def lengthen(chance: random.Random, tensors: Tensors) -> None:
        name = pick(chance, tensors)
        if tensors[name].ndim:
            tensors[name] = torch.cat([tensors[name].view(torch.uint8)] * 2).view(
                tensors[name].dtype
            )

    def reshape(chance: random.Random, tensors: Tensors) -> None:
        name = pick(chance, tensors)
        sizes = [[-1], [1, -1], [-1, 1], [1, 1, -1]]
        tensors[name] = tensors[name].reshape(chance.choice(sizes))

    def retype(chance: random.Random, tensors: Tensors) -> None:
        name = pick(chance, tensors)
        types = [torch.float32, torch.int8, torch.uint8, torch.int64, torch.float16, torch.bool]
        tensors[name] = tensors[name].float().to(chance.choice(types))

    def refill(chance: random.Random, tensors: Tensors) -> None:
        name = pick(chance, tensors)
        tensor = tensors[name].clone()
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        raw = tensor.reshape(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator))
        tensors[name] = tensor

    return (shorten, lengthen, reshape, retype, refill)[index]


@pytest.mark.parametrize("name", [*FORMS, "mxfp4"])
def test_damage_is_refused_or_read(name: str, tmp_path: Path) -> None:
    """Whatever the shapes, types and numbers: an answer or a `ConfigError`, and nothing else."""
    folder = folder_of(name, tmp_path)
    whole = load_file(folder / "model.safetensors")
    chance, refused = random.Random(name), 0
    for turn in range(40):
        tensors = dict(whole)
        change(turn % 5)(chance, tensors)
        save(folder, tensors)
        try:
            read_all(folder)
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 400
    assert refused > 0


ODD = (-5, 0, 1, 3, 7, 1000, 2**70, "a", "", None, [1], [], {}, True, 1.5, [0, 0], [2**40, 1])


def places(value: Any) -> list[tuple[Any, Any]]:
    """All (mapping or list, key) within it."""
    found: list[tuple[Any, Any]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_odd_descriptions_are_refused_or_read(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    whole = (folder / "config.json").read_text()
    chance = random.Random(name)
    for _ in range(40):
        config = json.loads(whole)
        owner, key = chance.choice(places(config)[1:])
        owner[key] = chance.choice(ODD)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            read_all(folder)
        except ConfigError as error:
            assert "\n" not in str(error)


def test_an_order_beyond_the_groups_is_refused(tmp_path: Path) -> None:
    for name, tensor in (("gptq-order", "g_idx"), ("ct-w4-order", "weight_g_idx")):
        folder = folder_of(name, tmp_path)
        tensors = load_file(folder / "model.safetensors")
        for wrong in (2, -1, 1 << 30):
            tensors[BASE + tensor][5] = wrong
            save(folder, tensors)
            assert "names groups from" in refusal(folder)


def test_a_module_that_no_group_names_is_refused(tmp_path: Path) -> None:
    folder = folder_of("ct-w4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    for targets in (["re:.*down_proj"], ["model.layers.1.mlp.up_proj"], []):
        group["targets"] = targets
        (folder / "config.json").write_text(json.dumps(config))
        assert "by the config_groups" in refusal(folder)
    for targets in (["re:.*up_proj$"], [BASE.rstrip(".")], ["re:.*down_proj", "Linear"]):
        group["targets"] = targets
        (folder / "config.json").write_text(json.dumps(config))
        read_all(folder)
