"""Recognising quantized checkpoints, to refuse them by the method's name: none can be read yet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

PLAIN_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Safetensors' names of the types that weights may have."""

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


def refuse_quantized(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None) -> None:
    """Raise `ConfigError` with the method's name if `config` (config.json) is that of a quantized
    checkpoint. `modelopt` is the content of NVIDIA's hf_quant_config.json, if that exists.
    """
    described = config.get("quantization_config") or config.get("compression_config")
    method = ""
    if isinstance(described, dict) and described:
        method = describe(described)
    elif described:
        method = f"an unknown method ({described})"
    elif modelopt is not None:
        inner = modelopt.get("quantization")
        algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
        method = f"ModelOpt{f' ({algorithm})' if algorithm else ''}"
    if method:
        raise refusal(f"{folder} holds weights quantized with {method}")


def describe(config: dict[str, Any]) -> str:
    """A `quantization_config` in words: the method and what is known of its form."""
    method = str(config.get("quant_method") or config.get("quant_algo") or "an unknown method")
    name = _NAMES.get(method.lower().replace(" ", ""), f"'{method}'")
    details = _details(config)
    return f"{name} ({', '.join(details)})" if details else name


def refuse_type(folder: Path, name: str, type_name: str, names: Iterable[str]) -> None:
    """Raise `ConfigError` if the tensor `name` of safetensors' type `type_name` isn't a plain
    one. `names`: all tensors of the checkpoint."""
    if type_name in PLAIN_TYPES:
        return
    sign = sign_of(name, names)
    method = f" ({sign})" if sign else ""
    kind = _TYPES.get(type_name, type_name)
    raise refusal(f"the weight '{name}' in {folder} has the quantized type {kind}{method}")


def refuse_quantized_tensors(folder: Path, types: dict[str, str]) -> None:
    """Raise `ConfigError` if the tensors of a file, by name and safetensors' type, are those of a
    quantized checkpoint. What isn't a weight (counters, masks of old checkpoints) isn't read."""
    for name, type_name in types.items():
        if name.endswith(".weight"):
            refuse_type(folder, name, type_name, types)
        for suffix, method in _SIGNS:
            weight = f"{name.removesuffix(suffix)}weight"
            if name.endswith(f".{suffix}") and weight not in types:
                raise refusal(f"{folder} has quantized weights ({method}) for '{weight}'")


def sign_of(name: str, names: Iterable[str]) -> str:
    """The method whose tensors lie beside weight `name`; "" if there are none."""
    beside = name.removesuffix("weight")
    present = {other.removeprefix(beside) for other in names if other.startswith(beside)}
    return next((method for suffix, method in _SIGNS if suffix in present), "")


def refusal(what: str) -> ConfigError:
    """The error that says `what` can't be served, and what can."""
    return ConfigError(
        f"{what}: not supported yet. Use the bfloat16 (or float16) checkpoint of the model."
    )


def _details(config: dict[str, Any]) -> list[str]:
    details = []
    if config.get("weight_block_size"):
        details.append("blocks of " + " x ".join(str(n) for n in config["weight_block_size"]))
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
