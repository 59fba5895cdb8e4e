"""The words of `quantization`: what a form of weights takes and needs. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.registry import WEIGHT_FORMATS


@dataclass(frozen=True)
class WeightForm:
    """A form in which matrices are kept in memory."""

    matrix_bytes: Callable[[int, int, int], int]
    """Bytes of a matrix of `outputs` x `inputs`, whose plain numbers have a third number of bytes.
    Norms and biases are plain."""
    layers: str = ""
    """"module:class" of the `WeightFormat`; "": that of the kernels in use."""
    kernels: tuple[str, ...] = ()
    """Words of `kernels` that multiply it; none: all do."""
    devices: tuple[str, ...] = ()
    """Devices that it runs on; none: all."""
    has_own_head: bool = False
    """An output head that is tied to the table of embeddings is a matrix of its own."""


PLAIN = WeightForm(lambda outputs, inputs, item: outputs * inputs * item)
"""Of the configuration's `dtype`."""

_GROUP = 32
"""Inputs with one scale of float16 (`engine.layers.grouped.GROUP`)."""


def _in_groups(bits: int) -> Callable[[int, int, int], int]:
    def num_bytes(outputs: int, inputs: int, item: int) -> int:
        if inputs % (_GROUP // 2):
            return outputs * inputs * item
        group = _GROUP if inputs % _GROUP == 0 else _GROUP // 2
        return outputs * (inputs * bits // 8 + inputs // group * 2)

    return num_bytes


INT8 = WeightForm(
    _in_groups(8),
    layers="engine.layers.weight_format:int8_format",
    kernels=("cpu",),
    devices=("cpu",),
    has_own_head=True,
)
"""A byte for each number; made while a plain checkpoint is read."""

INT4 = replace(INT8, matrix_bytes=_in_groups(4), layers="engine.layers.weight_format:int4_format")
"""Half a byte for each."""


def weight_form(quantization: str) -> WeightForm:
    """The form that the configuration's word names. Raises `ConfigError` on unknown words."""
    return PLAIN if quantization == "auto" else WEIGHT_FORMATS[quantization]


def check_form(quantization: str, key: str, value: str) -> None:
    """Raise `ConfigError` if the weights don't go with the `value` (not auto) of `key`: device,
    kernels, or a backend, which stands for its kernels."""
    form = weight_form(quantization)
    allowed = form.devices if key == "device" else form.kernels
    if allowed and value not in allowed:
        words = allowed if key == "device" else ("auto", *allowed)
        raise ConfigError(
            f"quantization {quantization} needs {key}: {' or '.join(words)}, not {value}; set it, "
            "or leave quantization out (quantization: auto)."
        )
