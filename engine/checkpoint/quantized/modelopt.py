"""NVIDIA's ModelOpt: FP8 and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine.checkpoint.quantized.base import CheckpointFormat, refuse, values
from engine.checkpoint.quantized.float4 import nvfp4_matrix
from engine.checkpoint.quantized.headers import TensorHeaders
from engine.checkpoint.quantized.matrices import StoredMatrix
from engine.checkpoint.quantized.scaled import ACTIVATIONS, scaled_matrix
from engine.checkpoint.values import ConfigValues

_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
KV_SCALES = "the checkpoint's scales of keys and values aren't used; `kv_cache_dtype` says theirs"


@dataclass(frozen=True)
class ModelOpt(CheckpointFormat):
    """`quant_method: modelopt`, or what hf_quant_config.json describes."""

    is_float4: bool

    @classmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        inner = values(config.path, config.mapping("quantization") or config.given)
        algorithm = str(inner.get("quant_algo"))
        if algorithm not in (*_FP8, "NVFP4"):
            refuse(title, config, f"whose algorithm is {algorithm}")
        stored = inner.get("kv_cache_quant_algo") or inner.get("kv_cache_scheme")
        is_float4 = algorithm == "NVFP4"
        notes = (_ACTIVATIONS_4 if is_float4 else ACTIVATIONS, *([KV_SCALES] if stored else []))
        return cls(title, notes, is_float4)

    def matrix(self, name: str, headers: TensorHeaders) -> StoredMatrix | None:
        if not name.endswith(".weight"):
            return None
        base = name.removesuffix("weight")
        if f"{base}pre_quant_scale" in headers:
            raise headers.error(f"{base}pre_quant_scale", "isn't known here")
        if not self.is_float4:
            return scaled_matrix(headers, name, ("weight_scale",))
        if headers[name].type != "U8" and f"{base}weight_scale_2" not in headers:
            return None
        return nvfp4_matrix(headers, base, "weight", "weight_scale_2", divides=False)


_ACTIVATIONS_4 = "activations aren't rounded to 4 bits, which the format allows: results are finer"
