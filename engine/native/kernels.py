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
        raise ConfigError(
            f"{key} cpu needs the library of CPU kernels: {library.reason()}. "
            f"{key}: torch runs without it."
        )
    return kernels
