"""bitsandbytes: NF4 and FP4 with tables, and int8."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from engine.checkpoint.quantized.base import CheckpointFormat
from engine.checkpoint.quantized.headers import TensorHeaders
from engine.checkpoint.quantized.matrices import CodebookMatrix, StoredMatrix
from engine.checkpoint.quantized.scaled import scaled_matrix
from engine.checkpoint.values import ConfigValues

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_ACTIVATIONS = "activations aren't rounded to 8 bits, and outliers aren't computed apart"


@dataclass(frozen=True)
class BitsAndBytes(CheckpointFormat):
    """`quant_method: bitsandbytes`."""

    is_int8: bool

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        is_int8 = bool(config.get("load_in_8bit") or config.get("_load_in_8bit"))
        return cls(title, (_ACTIVATIONS,) if is_int8 else (), is_int8)

    def matrix(self, name: str, headers: TensorHeaders) -> StoredMatrix | None:
        if not name.endswith(".weight"):
            return None
        base = name.removesuffix("weight")
        return self._int8(base, headers) if self.is_int8 else _codebook(base, headers)

    def _int8(self, base: str, headers: TensorHeaders) -> StoredMatrix | None:
        found = scaled_matrix(headers, f"{base}weight", ("SCB",), ("I8",))
        if found is None:
            return None
        others = headers.present(base, ("weight_format",))
        for form in others:
            headers.check(form, found.name, ("U8", "I8", "I32", "I64"))
            if headers.numbers(form) != [0]:
                raise headers.error(form, "says that rows aren't stored as rows")
        return replace(found, tensors=(*found.tensors, *others), factor=1 / 127)


def _codebook(base: str, headers: TensorHeaders) -> CodebookMatrix | None:
    of = f"{base}weight"
    states = headers.present(base, [_STATE + kind for kind in _KINDS])
    if not states and headers[of].type != "U8":
        return None
    state_name = states[0] if states else base + _STATE + "nf4"
    state = _state(headers, state_name, of)
    shape = tuple(_whole(headers, state_name, n) for n in _list(headers, state_name, state))
    block = _whole(headers, state_name, state.get("blocksize"))
    numel = math.prod(shape)
    halves = -(-numel // 2)
    headers.check(of, of, ("U8",), ((halves, 1), (1, halves), (halves,)))
    scales, codes = f"{of}.absmax", f"{of}.quant_map"
    blocks = -(-numel // block)
    headers.check(codes, of, ("F32",), ((16,),))
    found = CodebookMatrix(
        name=of,
        shape=shape,
        tensors=(of, state_name, scales, codes),
        numbers=of,
        codes=codes,
        scales=scales,
        block=block,
    )
    if "nested_blocksize" not in state:
        headers.check(scales, of, ("F32",), ((blocks,),))
        return found
    nested = _whole(headers, state_name, state["nested_blocksize"])
    offset = state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise headers.error(state_name, "names no nested_offset")
    headers.check(scales, of, ("U8",), ((blocks,),))
    headers.check(f"{of}.nested_absmax", of, ("F32",), ((-(-blocks // nested),),))
    headers.check(f"{of}.nested_quant_map", of, ("F32",), ((256,),))
    return replace(
        found,
        tensors=(*found.tensors, f"{of}.nested_absmax", f"{of}.nested_quant_map"),
        nested_codes=f"{of}.nested_quant_map",
        nested_scales=f"{of}.nested_absmax",
        nested_block=nested,
        nested_offset=float(offset),
    )


def _state(headers: TensorHeaders, name: str, of: str) -> Mapping[str, Any]:
    """What is written in the tensor of that name, as JSON."""
    headers.check(name, of, ("U8",))
    try:
        found = json.loads(bytes(headers.numbers(name)))
    except ValueError as error:
        raise headers.error(name, f"isn't JSON ({error})") from error
    if not isinstance(found, dict):
        raise headers.error(name, "isn't a JSON object")
    return found


def _list(headers: TensorHeaders, name: str, state: Mapping[str, Any]) -> list[Any]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise headers.error(name, f"names the shape {shape!r}")
    return shape


def _whole(headers: TensorHeaders, name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise headers.error(name, f"has {value!r} where a size is wanted")
    return value
