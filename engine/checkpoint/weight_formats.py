"""The words of `quantization`: what a form of weights takes and needs. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

INT8 = WeightForm(
    lambda outputs, inputs, item: outputs * (inputs + 4),  # a float32 scale for each output
    layers="engine.layers.weight_format:Int8Format",
    kernels=("cpu",),
    devices=("cpu",),
    has_own_head=True,
)
"""A byte for each number; made while a plain checkpoint is read."""


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
