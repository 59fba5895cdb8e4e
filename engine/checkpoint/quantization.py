"""How the weights of a checkpoint are quantized, or that they can't be read so. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.checkpoint.quantized.base import CheckpointFormat, refusal, values
from engine.checkpoint.quantized.headers import FLOATS, TensorHeaders
from engine.checkpoint.quantized.matrices import StoredMatrix
from engine.errors import ConfigError
from engine.registry import CHECKPOINT_FORMATS

MODELOPT_NAME = "hf_quant_config.json"
"""Where ModelOpt describes what it has done, if not in config.json."""

_TYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}

_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "fbgemm_fp8": "FBGEMM FP8",
    "finegrained_fp8": "FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "marlin": "Marlin",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}

_SIGNS = (
    ("qweight", "GPTQ or AWQ"),
    ("weight_packed", "compressed-tensors, packed"),
    ("weight_scale_inv", "FP8 in blocks"),
    ("weight_scale", "FP8 or compressed-tensors"),
    ("weight.absmax", "bitsandbytes"),
    ("SCB", "bitsandbytes, 8 bits"),
    ("weight_blocks", "MXFP4"),
)
"""Tensors that lie beside a quantized weight. They reveal it if config.json says nothing."""


def read_format(
    folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None
) -> CheckpointFormat | None:
    """The method by which the checkpoint of `config` (config.json) is quantized; None if it is
    plain. `modelopt` is the content of NVIDIA's hf_quant_config.json, if that exists.

    Raises `ConfigError` with the method's name if it can't be read.
    """
    path = folder / "config.json"
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    keys = ("quantization_config", "compression_config")
    described = next((place[key] for place in places for key in keys if place.get(key)), None)
    if described is None and modelopt is not None:
        path = folder / MODELOPT_NAME
        described = {**modelopt, "quant_method": "modelopt"}
    if described is None:
        return None
    if not isinstance(described, dict):
        raise refusal(f"{folder} holds weights quantized with an unknown method ({described})")
    title = describe(described)
    word = _method(described)
    if word not in CHECKPOINT_FORMATS:
        raise refusal(f"{folder} holds weights quantized with {title}")
    form: type[CheckpointFormat] = CHECKPOINT_FORMATS[word]
    return form.read(title, values(path, described))


def format_of(folder: Path) -> CheckpointFormat | None:
    """The same of a model folder, as its files say it. Raises `ConfigError`."""
    found = []
    for name in ("config.json", MODELOPT_NAME):
        try:
            found.append(json.loads((folder / name).read_bytes()))
        except FileNotFoundError:
            found.append(None)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{folder / name} is not valid JSON: {error}. Download the file again."
            ) from error
    config, modelopt = (x if isinstance(x, dict) else None for x in found)
    return read_format(folder, config or {}, modelopt)


def stored_matrices(
    form: CheckpointFormat | None, headers: TensorHeaders
) -> dict[str, StoredMatrix]:
    """The quantized matrices of a checkpoint, by the name that transformers has for them.

    Raises `ConfigError` if tensors are missing or don't fit each other, or if there are quantized
    weights that aren't of this format; None: all must be plain.
    """
    found: dict[str, StoredMatrix] = {}
    if form is not None:
        for name in headers:
            matrix = form.matrix(name, headers)
            if matrix is not None:
                found[matrix.name] = matrix
    taken = {tensor for matrix in found.values() for tensor in matrix.tensors}
    _refuse_quantized_tensors(headers, taken)
    return found


def _method(config: dict[str, Any]) -> str:
    method = config.get("quant_method") or ("modelopt" if config.get("quant_algo") else "")
    return str(method).lower().replace(" ", "").replace("_", "-")


def describe(config: dict[str, Any]) -> str:
    """A `quantization_config` in words: the method and what is known of its form."""
    method = str(config.get("quant_method") or config.get("quant_algo") or "an unknown method")
    name = _NAMES.get(method.lower().replace(" ", ""), f"'{method}'")
    details = _details(config)
    return f"{name} ({', '.join(details)})" if details else name


def _refuse_quantized_tensors(headers: TensorHeaders, taken: set[str]) -> None:
    """Raise `ConfigError` if tensors other than those `taken` are a quantized checkpoint's. What
    isn't a weight (counters, masks of old checkpoints) isn't read."""
    for name, header in headers.items():
        if name in taken:
            continue
        if name.endswith(".weight") and header.type not in FLOATS:
            sign = sign_of(name, headers)
            method = f" ({sign})" if sign else ""
            kind = _TYPES.get(header.type, header.type)
            raise refusal(
                f"the weight '{name}' in {headers.folder} has the quantized type {kind}{method}, "
                "which config.json doesn't describe"
            )
        for suffix, method in _SIGNS:
            weight = f"{name.removesuffix(suffix)}weight"
            if name.endswith(f".{suffix}") and weight not in headers:
                raise refusal(
                    f"{headers.folder} has quantized weights ({method}) for '{weight}', which "
                    "config.json doesn't describe"
                )


def sign_of(name: str, names: Iterable[str]) -> str:
    """The method whose tensors lie beside weight `name`; "" if there are none."""
    beside = name.removesuffix("weight")
    present = {other.removeprefix(beside) for other in names if other.startswith(beside)}
    return next((method for suffix, method in _SIGNS if suffix in present), "")


def _details(config: dict[str, Any]) -> list[str]:
    details = []
    if isinstance(config.get("weight_block_size"), list):
        details.append("blocks of " + " x ".join(str(n) for n in config["weight_block_size"]))
    inner = config.get("quantization")
    algorithm = (inner if isinstance(inner, dict) else config).get("quant_algo")
    if isinstance(algorithm, str) and config.get("quant_method"):
        details.append(algorithm)
    for key in ("format", "fmt", "activation_scheme", "bnb_4bit_quant_type"):
        if isinstance(config.get(key), str):
            details.append(config[key])
    for key, name in (("load_in_4bit", "4 bits"), ("load_in_8bit", "8 bits")):
        if config.get(key):
            details.append(name)
    bits = config.get("bits", config.get("w_bit"))
    if isinstance(bits, int):
        details.append(f"{bits} bits")
    return details
