"""Checks of the configuration keys that say who may call."""

from __future__ import annotations

import re
from collections.abc import Iterable

from deploy.http.access.key_file import read_keys
from engine.errors import ConfigError

_ORIGIN = re.compile(r"https?://[^/\s*]+")


def check_access(api_keys_file: str | None, auth: str | None, cors_origins: Iterable[str]) -> None:
    """Raise `ConfigError` naming the key whose value can't be used."""
    if auth == "keys" and not api_keys_file:
        raise ConfigError("auth: keys needs api_keys_file, the path of a file with keys.")
    if auth == "none" and api_keys_file:
        raise ConfigError("auth: none and api_keys_file contradict each other; remove one of them.")
    if api_keys_file and not read_keys(api_keys_file):
        raise ConfigError(f"api_keys_file {api_keys_file} has no key, so nobody could call.")
    for origin in cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins: {origin!r} is not an origin; write it as https://chat.example.com, "
                "without a path."
            )
