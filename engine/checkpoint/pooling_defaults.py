"""How a model wants to be pooled: sentence-transformers' `1_Pooling/config.json` in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.protocol.pooling import Pooling

FILE = "1_Pooling/config.json"
_FLAG = "pooling_mode_"
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""What Manta has, in sentence-transformers' words and flags."""


def read_pooling(folder: Path) -> Pooling:
    """The pooling that the model's folder names; "last" if it has no such file.

    Raises `ConfigError` if the file can't be read or names another one.
    """
    path = folder / FILE
    if not path.is_file():
        return "last"
    advice = "Set pooling: last or mean."
    try:
        modes = _modes(json.loads(path.read_bytes()))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} can't be read: {error}. {advice}") from error
    if len(modes) != 1 or modes[0] not in _MODES:
        named = " and ".join(modes) or "none"
        raise ConfigError(
            f"{path} names the pooling {named}; Manta has lasttoken and mean. {advice}"
        )
    return _MODES[modes[0]]


def _modes(content: Any) -> list[str]:
    """All that the file names, by one word or by flags."""
    word = content.get("pooling_mode")
    if word is not None:
        return [str(word).lower()]
    flags = [name for name, value in content.items() if value is True and name.startswith(_FLAG)]
    return [name.removeprefix(_FLAG) for name in flags]
