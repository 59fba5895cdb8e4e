"""`ConfigValues`: the values of a checkpoint's JSON file, with their types checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError

MAX_SHOWN_CHARS = 200
"""Of a value, in an error."""


class ConfigValues(NamedTuple):
    """What the file has, and what keys mean that it lacks.

    A key with null is one that is missing, except where null says "none" (`optional_size`,
    `token_ids`). All methods raise `ConfigError`, which names file and key.
    """

    path: Path
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The value; the default if it is missing or null."""
        value = self.given.get(key)
        return self.defaults.get(key) if value is None else value

    def size(self, key: str) -> int:
        """A whole number, 1 or more."""
        return self._whole(key, self._needed(key), 1)

    def count(self, key: str) -> int:
        """A whole number, 0 or more."""
        return self._whole(key, self._needed(key), 0)

    def optional_size(self, key: str) -> int | None:
        """A whole number, 1 or more. None if the file says null."""
        value = self.given.get(key, self.defaults.get(key))
        return None if value is None else self._whole(key, value, 1)

    def number(self, key: str) -> float:
        """A number above 0."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._needed(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._needed(key)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """A new mapping, empty if there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "a mapping")
        return dict(value or {})

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or several. Null means none."""
        value = self.given.get(key, self.defaults.get(key))
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in listed):
            raise self.error(key, "a token id or a list of them")
        return tuple(listed)

    def error(self, key: str, wanted: str) -> ConfigError:
        """The error of a value that isn't what is `wanted`."""
        found = repr(self.get(key))
        if len(found) > MAX_SHOWN_CHARS:
            found = f"{found[:MAX_SHOWN_CHARS]}..."
        return ConfigError(f"{self.path}: {key} must be {wanted}, not {found}.")

    def _needed(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks the key '{key}'.")
        return value

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            raise self.error(key, f"a whole number, {least} or more")
        return value
