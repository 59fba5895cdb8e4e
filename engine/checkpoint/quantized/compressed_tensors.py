"""compressed-tensors, as llm-compressor writes it: FP8, INT8, packed numbers, NVFP4, MXFP4."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from engine.checkpoint.quantized.base import CheckpointFormat, group_size, refuse, values
from engine.checkpoint.quantized.float4 import mxfp4_matrix, nvfp4_matrix
from engine.checkpoint.quantized.headers import FLOAT8, FLOATS, TensorHeaders
from engine.checkpoint.quantized.matrices import PackedMatrix, StoredMatrix
from engine.checkpoint.quantized.modelopt import KV_SCALES
from engine.checkpoint.quantized.scaled import UNREAD, block_of, scaled_matrix
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError

_NUMBERS = {
    "pack-quantized": "weight_packed",
    "nvfp4-pack-quantized": "weight_packed",
    "mxfp4-pack-quantized": "weight_packed",
    "float-quantized": "weight",
    "int-quantized": "weight",
    "naive-quantized": "weight",
}
"""What matrices of each format have their numbers in."""
_ACTIVATIONS = "activations aren't rounded, which the format allows: results are finer"


@dataclass(frozen=True)
class Scheme:
    """How the modules of a group are quantized."""

    targets: tuple[str, ...]
    """Names of modules, expressions behind "re:", or names of classes."""
    form: str
    """A key of `_NUMBERS`."""
    kind: str
    """"int" or "float"."""
    bits: int
    group: int
    """Inputs that share a scale; 0: the scales' shape says it."""
    block: tuple[int, int] | None


@dataclass(frozen=True)
class CompressedTensors(CheckpointFormat):
    """`quant_method: compressed-tensors`."""

    schemes: tuple[Scheme, ...]

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        status = config.get("quantization_status")
        if status not in (None, "compressed"):
            refuse(title, config, f"of which quantization_status is {status}")
        sparse = config.mapping("sparsity_config").get("format", "dense")
        if sparse != "dense":
            refuse(title, config, f"whose zeros are left out ({sparse})")
        if config.mapping("transform_config").get("config_groups"):
            refuse(title, config, "whose inputs are transformed (transform_config)")
        groups = config.mapping("config_groups")
        schemes = tuple(
            scheme
            for name, group in groups.items()
            if (scheme := _scheme(title, config, name, group)) is not None
        )
        acts = any(isinstance(g, dict) and g.get("input_activations") for g in groups.values())
        stored = config.get("kv_cache_scheme")
        notes = (*([_ACTIVATIONS] if acts else []), *([KV_SCALES] if stored else []))
        return cls(title, notes, schemes)

    def matrix(self, name: str, headers: TensorHeaders) -> StoredMatrix | None:
        base, _, last = name.rpartition(".")
        if last not in ("weight", "weight_packed"):
            return None
        is_packed = last == "weight_packed"
        is_marked = is_packed or headers[name].type in (*FLOAT8, "I8", "U8")
        if not is_marked and f"{base}.weight_scale" not in headers:
            return None
        scheme = self._scheme_of(base)
        if scheme is None or _NUMBERS[scheme.form] != last:
            raise ConfigError(
                f"{headers.folder} has the quantized tensor '{name}', but by the config_groups of "
                f"config.json '{base}' isn't quantized so; download config.json again."
            )
        return _matrix(scheme, f"{base}.", headers)

    def _scheme_of(self, module: str) -> Scheme | None:
        """That of the group which names the module most closely."""
        for match in (_is_name, _is_expression, _is_class):
            for scheme in self.schemes:
                if any(match(target, module) for target in scheme.targets):
                    return scheme
        return None


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_expression(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _is_class(target: str, module: str) -> bool:
    """Classes aren't known without the model's code: any may be meant."""
    return "." not in target and not target.startswith("re:")


def _scheme(title: str, config: ConfigValues, name: str, group: Any) -> Scheme | None:
    """Of one of the config_groups; None: its weights aren't quantized."""
    if not isinstance(group, dict):
        raise config.error("config_groups", "a mapping of mappings")
    inner = values(config.path, group)
    if inner.get("weights") is None:
        return None
    weights = ConfigValues(config.path, inner.mapping("weights"), {"type": "int"})
    form = inner.get("format") or config.get("format")
    if not isinstance(form, str) or form not in _NUMBERS:
        refuse(title, config, f"whose {name} has the format {form}")
    kind, bits = weights.text("type"), weights.size("num_bits")
    known = {
        "pack-quantized": kind == "int" and bits in (2, 4, 8),
        "nvfp4-pack-quantized": kind == "float" and bits == 4,
        "mxfp4-pack-quantized": kind == "float" and bits == 4,
    }
    if not known.get(form, bits == 8 and kind in ("int", "float")):
        refuse(title, config, f"whose {name} has {bits} bits ({kind}, {form})")
    targets = inner.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise inner.error("targets", "a list of names")
    for target in targets:
        _check_expression(inner, target)
    block = None
    if weights.get("block_structure") is not None:
        block = block_of(weights, "block_structure")
    group_inputs = group_size(weights, "group_size")
    if block is None and group_inputs:
        block = (1, group_inputs)
    return Scheme(tuple(targets), form, kind, bits, group_inputs, block)


def _check_expression(config: ConfigValues, target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise config.error("targets", f"regular expressions behind 're:' ({error})") from error


def _matrix(scheme: Scheme, base: str, headers: TensorHeaders) -> StoredMatrix | None:
    if scheme.form == "nvfp4-pack-quantized":
        over = "weight_global_scale"
        return nvfp4_matrix(headers, base, "weight_packed", over, divides=True)
    if scheme.form == "mxfp4-pack-quantized":
        return mxfp4_matrix(headers, base, "weight_packed")
    if scheme.form == "pack-quantized":
        return _packed(scheme, base, headers)
    types = ("I8",) if scheme.kind == "int" else FLOAT8
    names = ("weight_scale",)
    zeros = "weight_zero_point" if scheme.kind == "int" else None
    return scaled_matrix(headers, f"{base}weight", names, types, scheme.block, zeros)


def _packed(scheme: Scheme, base: str, headers: TensorHeaders) -> PackedMatrix:
    of, numbers, per = f"{base}weight", f"{base}weight_packed", 32 // scheme.bits
    stored = headers.check(numbers, of, ("I32",)).shape
    headers.check(f"{base}weight_shape", of, ("I32", "I64"), ((2,),))
    out, inputs = headers.numbers(f"{base}weight_shape")
    if min(out, inputs) < 1 or stored != (out, -(-inputs // per)):
        raise headers.error(numbers, f"has shape {list(stored)} for a weight of {[out, inputs]}")
    group = min(scheme.group or inputs, inputs)
    groups = -(-inputs // group)
    scales = ((out, groups), *([(out,)] if groups == 1 else []))
    headers.check(f"{base}weight_scale", of, FLOATS, scales)
    tensors = [numbers, f"{base}weight_shape", f"{base}weight_scale"]
    tensors += headers.present(base, UNREAD)
    found: dict[str, str | None] = {}
    for role, name, shape, types in (
        ("zeros", "weight_zero_point", (-(-out // per), groups), ("I32",)),
        ("order", "weight_g_idx", (inputs,), ("I32", "I64")),
    ):
        found[role] = base + name if base + name in headers else None
        if base + name in headers:
            headers.check(base + name, of, types, (shape,))
            tensors.append(base + name)
    return PackedMatrix(
        name=of,
        shape=(out, inputs),
        tensors=tuple(tensors),
        layout="rows",
        numbers=numbers,
        scales=f"{base}weight_scale",
        zeros=found["zeros"],
        order=found["order"],
        bits=scheme.bits,
        group=group,
    )
