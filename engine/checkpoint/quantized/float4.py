"""MXFP4 as gpt-oss has it, and the float4 matrices of other methods."""

from __future__ import annotations

from typing import Self

from engine.checkpoint.quantized.base import CheckpointFormat
from engine.checkpoint.quantized.headers import FLOATS, TensorHeaders
from engine.checkpoint.quantized.matrices import Float4Matrix
from engine.checkpoint.quantized.scaled import UNREAD
from engine.checkpoint.values import ConfigValues

_BYTES = 16
"""Of a block of 32 numbers."""


class Mxfp4(CheckpointFormat):
    """`quant_method: mxfp4`: matrices of experts, which transformers has transposed."""

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        return cls(title, ())

    def matrix(self, name: str, headers: TensorHeaders) -> Float4Matrix | None:
        if not name.endswith("_blocks"):
            return None
        of = name.removesuffix("_blocks")
        shape = headers.check(name, of, ("U8",)).shape
        if len(shape) not in (3, 4) or shape[-1] != _BYTES or 0 in shape:
            raise headers.error(name, f"has shape {list(shape)} instead of blocks of 16 bytes")
        headers.check(f"{of}_scales", of, ("U8", "F8_E8M0"), (shape[:-1],))
        *lead, out, blocks, _ = shape
        return Float4Matrix(
            name=of,
            shape=(*lead, blocks * 32, out),
            tensors=(name, f"{of}_scales"),
            numbers=name,
            scales=f"{of}_scales",
            block=32,
            has_exponents=True,
            is_transposed=True,
            is_blocked=True,
        )


def nvfp4_matrix(
    headers: TensorHeaders, base: str, numbers: str, over: str, *, divides: bool
) -> Float4Matrix:
    """The matrix at `base` (up to "weight") with blocks of 16 numbers and one scale `over` theirs.
    Raises `ConfigError` if tensors are missing or don't fit."""
    found = _float4(headers, base, numbers, 16, ("F8_E4M3",))
    headers.check(base + over, f"{base}weight", FLOATS, ((), (1,)))
    return Float4Matrix(
        name=f"{base}weight",
        shape=found,
        tensors=(
            base + numbers,
            f"{base}weight_scale",
            base + over,
            *headers.present(base, UNREAD),
        ),
        numbers=base + numbers,
        scales=f"{base}weight_scale",
        block=16,
        has_exponents=False,
        over=base + over,
        divides=divides,
    )


def mxfp4_matrix(headers: TensorHeaders, base: str, numbers: str) -> Float4Matrix:
    """The same with blocks of 32 numbers and powers of two."""
    return Float4Matrix(
        name=f"{base}weight",
        shape=_float4(headers, base, numbers, 32, ("U8", "F8_E8M0")),
        tensors=(base + numbers, f"{base}weight_scale", *headers.present(base, UNREAD)),
        numbers=base + numbers,
        scales=f"{base}weight_scale",
        block=32,
        has_exponents=True,
    )


def _float4(
    headers: TensorHeaders, base: str, numbers: str, block: int, types: tuple[str, ...]
) -> tuple[int, int]:
    """Outputs and inputs."""
    of = f"{base}weight"
    shape = headers.check(base + numbers, of, ("U8",)).shape
    if len(shape) != 2 or 0 in shape or shape[1] * 2 % block:
        raise headers.error(
            base + numbers, f"has shape {list(shape)} instead of rows of blocks of {block} numbers"
        )
    headers.check(f"{base}weight_scale", of, types, ((shape[0], shape[1] * 2 // block),))
    return shape[0], shape[1] * 2
