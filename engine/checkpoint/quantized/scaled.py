"""Matrices of float8 or int8 with scales, as several methods have them, and the methods that have
nothing else: FP8 as DeepSeek, Qwen and others publish it, and FBGEMM's."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from engine.checkpoint.quantized.base import CheckpointFormat, refuse_words
from engine.checkpoint.quantized.headers import FLOAT8, FLOATS, TensorHeaders
from engine.checkpoint.quantized.matrices import ScaledMatrix
from engine.checkpoint.values import ConfigValues

SCALE_TYPES = (*FLOATS, "F8_E8M0")
UNREAD = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "activation_scale",
    "act_scale",
)
"""Tensors beside a weight that are about activations."""
DEFAULT_BLOCK = (128, 128)
ACTIVATIONS = "activations aren't rounded to 8 bits, which the format allows: results are finer"


def scaled_matrix(
    headers: TensorHeaders,
    name: str,
    scale_names: Collection[str],
    types: Collection[str] = FLOAT8,
    block: tuple[int, int] | None = None,
    zero_name: str | None = None,
) -> ScaledMatrix | None:
    """The matrix whose numbers are the tensor `name`, if a scale named in `scale_names` (what
    stands in place of its last part) lies beside it, or if its type is one of `types`.

    `block`: outputs and inputs that may have a scale; also a row or all may have one. Raises
    `ConfigError` if tensors are missing or don't fit.
    """
    module, _, last = name.rpartition(".")
    base = f"{module}." if module else ""
    scales = next((base + s for s in scale_names if base + s in headers), None)
    if scales is None and headers[name].type not in types:
        return None
    scales = scales or base + next(iter(scale_names))
    shape = headers.check(name, name, types).shape
    if len(shape) not in (2, 3):
        raise headers.error(name, f"has shape {list(shape)} instead of two or three sizes")
    stored = headers.check(scales, name, SCALE_TYPES).shape
    blocks = _blocks(shape, stored, block)
    if blocks is None:
        raise headers.error(scales, f"has shape {list(stored)} for a weight of {list(shape)}")
    zeros = None
    if zero_name is not None and base + zero_name in headers:
        zeros = base + zero_name
        headers.check(zeros, name, ("I8",), (stored,))
    others = headers.present(base, UNREAD) if last == "weight" else ()
    return ScaledMatrix(
        name=name,
        shape=shape,
        tensors=(name, scales, *([zeros] if zeros else []), *others),
        numbers=name,
        scales=scales,
        scales_shape=tuple(-(-n // b) for n, b in zip(shape, blocks, strict=True)),
        block=blocks,
        zeros=zeros,
    )


def _blocks(
    shape: tuple[int, ...], stored: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """Numbers that share a scale along each dimension of a matrix of `shape`, whose scales are
    `stored` so; None if they don't fit."""
    if 0 in shape:
        return None
    lead, (out, inputs) = shape[:-2], shape[-2:]
    alone = (1,) * len(lead)
    if block is not None and stored == (*lead, -(-out // block[0]), -(-inputs // block[1])):
        return (*alone, *block)
    if math.prod(stored) == 1:
        return shape
    if stored in ((*lead, out, 1), (*lead, out)):
        return (*alone, 1, inputs)
    if lead and stored == (*lead, 1, inputs):
        return (*alone, out, 1)
    return None


@dataclass(frozen=True)
class Fp8(CheckpointFormat):
    """`quant_method: fp8`: a scale for each block, or one for each matrix."""

    block: tuple[int, int] = DEFAULT_BLOCK

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        refuse_words(title, config, {"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)})
        return cls(title, (ACTIVATIONS,), block_of(config, "weight_block_size"))

    def matrix(self, name: str, headers: TensorHeaders) -> ScaledMatrix | None:
        if name.endswith(".weight"):
            names = ("weight_scale_inv", "weight_scale")
        elif name.endswith(("gate_up_proj", "down_proj")):
            last = name.rpartition(".")[2]
            names = (f"{last}_scale_inv", f"{last}_scale")
        else:
            return None
        return scaled_matrix(headers, name, names, block=self.block)


class Fbgemm(Fp8):
    """`quant_method: fbgemm_fp8`: a scale for each output."""

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        return cls(title, (ACTIVATIONS,))


def block_of(config: ConfigValues, key: str) -> tuple[int, int]:
    """Outputs and inputs of a block. Raises `ConfigError`."""
    value = config.get(key)
    if value is None:
        return DEFAULT_BLOCK
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", value):
        rows, columns = value.split("x")  # of older versions of compressed-tensors
        return int(rows), int(columns)
    whole = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    if not whole or len(value) != 2:
        raise config.error(key, "two whole numbers above 0")
    return value[0], value[1]
