"""The kernels, for those who cannot do without them."""

from __future__ import annotations

from types import ModuleType

from engine.errors import ConfigError
from engine.native import library


def require_kernels(key: str = "attention_backend") -> ModuleType:
    """The library of CPU kernels. Raises `ConfigError` with the reason if it can't be had.

    `key` is the configuration's key whose value cpu asks for it.
    """
    kernels = library.load()
    if kernels is None:
        raise without_kernels(key, "cpu", library.reason())
    return kernels


def without_kernels(key: str, value: str, reason: str) -> ConfigError:
    """The error of a configuration's `key` whose `value` needs the library, which can't be had for
    this `reason`."""
    other = "auto" if key == "quantization" else "torch"
    return ConfigError(
        f"{key} {value} needs the library of CPU kernels: {reason}. {key}: {other} runs without it."
    )
