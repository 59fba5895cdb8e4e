"""GPTQ and AWQ: whole numbers in int32, of a matrix that lies transposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from engine.checkpoint.quantized.base import CheckpointFormat, group_size, refuse, refuse_words
from engine.checkpoint.quantized.headers import FLOATS, TensorHeaders
from engine.checkpoint.quantized.matrices import PackedMatrix
from engine.checkpoint.values import ConfigValues


@dataclass(frozen=True)
class Gptq(CheckpointFormat):
    """`quant_method: gptq`, and the base of AWQ."""

    bits: int
    group: int
    """0: all inputs of an output."""
    zero_shift: int
    layout: Literal["gptq", "awq"] = "gptq"

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        refuse_words(
            title,
            config,
            {
                "bits": (2, 4, 8),
                "checkpoint_format": ("gptq", "gptq_v2"),
                "format": ("gptq", "gptq_v2"),
                "pack_dtype": ("int32",),
                "is_marlin_format": (False,),
            },
        )
        changed = [name for name in config.mapping("dynamic") if not name.startswith("-:")]
        if changed:
            refuse(title, config, f"with bits or groups of their own for '{changed[0]}'")
        word = config.get("checkpoint_format") or config.get("format") or "gptq"
        shift = 0 if word.lower() == "gptq_v2" else 1
        return cls(title, (), config.size("bits"), group_size(config, "group_size"), shift)

    def matrix(self, name: str, headers: TensorHeaders) -> PackedMatrix | None:
        if not name.endswith(".qweight"):
            return None
        base = name.removesuffix("qweight")
        of, scales, zeros, order = (base + s for s in ("weight", "scales", "qzeros", "g_idx"))
        per = 32 // self.bits
        stored = headers.check(name, of, ("I32",)).shape
        if len(stored) != 2 or 0 in stored:
            raise headers.error(name, f"has shape {list(stored)} instead of two sizes")
        if self.layout == "gptq":
            inputs, out = stored[0] * per, stored[1]
        else:
            inputs, out = stored[0], stored[1] * per
        group = min(self.group or inputs, inputs)
        groups = -(-inputs // group)
        headers.check(scales, of, FLOATS, ((groups, out),))
        headers.check(zeros, of, ("I32",), ((groups, -(-out // per)),))
        has_order = self.layout == "gptq" and order in headers
        if has_order:
            headers.check(order, of, ("I32", "I64"), ((inputs,),))
        return PackedMatrix(
            name=of,
            shape=(out, inputs),
            tensors=(name, scales, zeros, *([order] if has_order else [])),
            layout=self.layout,
            numbers=name,
            scales=scales,
            zeros=zeros,
            order=order if has_order else None,
            bits=self.bits,
            group=group,
            zero_shift=self.zero_shift,
        )


class Awq(Gptq):
    """`quant_method: awq`, of the version "gemm"."""

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        bits = "bits" if config.get("bits") is not None else "w_bit"
        size = "group_size" if config.get("group_size") is not None else "q_group_size"
        refuse_words(title, config, {bits: (4,), "version": ("gemm",), "zero_point": (True,)})
        return cls(title, (), config.size(bits), group_size(config, size), 0, "awq")
