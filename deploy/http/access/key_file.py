"""`KeyFile`: the keys that are valid now."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import ValidationError

from deploy.http.access.api_key import ApiKey, KeyList
from engine.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
"""How often the file is looked at, when requests come."""
MAX_FILE_BYTES = 2**20
MAX_KEY_BYTES = 1024
"""Of what a client sends as its key."""


class _Version(NamedTuple):
    """Tells one content of the file from another. A Kubernetes Secret is a link that is turned to
    another file when it changes, which `inode` shows."""

    inode: int
    modified_ns: int
    size: int


class KeyFile:
    """Reads `path` (docs/security.md has its format) and reads it again when it has changed.

    If a change can't be read, the keys before it stay valid, and the log says why.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._keys: tuple[tuple[bytes, ApiKey], ...] = ()
        self._version: _Version | None = None
        self._looked_at = -CHECK_EVERY_S
        self._problem = ""

    def find(self, secrets: list[bytes]) -> ApiKey | None:
        """The key whose text is one of `secrets`.

        Every secret is compared with every key, whichever matches, so that the time it takes tells
        a client nothing.
        """
        self._look()
        found = None
        for secret in secrets:
            digest = hashlib.sha256(secret[:MAX_KEY_BYTES]).digest()
            for expected, key in self._keys:
                if hmac.compare_digest(digest, expected) and len(secret) <= MAX_KEY_BYTES:
                    found = key
        return found

    def named(self, name: str) -> ApiKey | None:
        """The key of this name."""
        self._look()
        return next((key for _, key in self._keys if key.name == name), None)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < CHECK_EVERY_S:
            return
        self._looked_at = now
        try:
            found = os.stat(self._path)
            version = _Version(found.st_ino, found.st_mtime_ns, found.st_size)
            if version != self._version:
                self._keys = tuple((bytes.fromhex(k.sha256), k) for k in read_keys(self._path))
                self._version = version
                logger.info("%s: %d keys", self._path, len(self._keys))
            self._problem = ""
        except (OSError, ConfigError) as error:
            problem = str(error)
            if problem != self._problem:  # said once, not every second
                logger.error("the keys stay as they were (%d): %s", len(self._keys), problem)
            self._problem = problem


def read_keys(path: str) -> list[ApiKey]:
    """The keys in a file. Raises `ConfigError` that says what is wrong, without quoting hashes."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_keys_file {path} can't be read: {error.strerror}.") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"api_keys_file {path} is larger than {MAX_FILE_BYTES} bytes.")
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise ConfigError(f"api_keys_file {path} is not valid YAML{line}.") from None
    try:
        return KeyList.model_validate(content).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"api_keys_file {path}: {place}: {first['msg']}.") from None


def key_of(keys: KeyFile | None, owner: str) -> ApiKey | None:
    """The key of whom a kept request belongs to; None if the server has none. Raises `RequestError`
    if it is valid no longer."""
    if keys is None or not owner:
        return None
    key = keys.named(owner)
    if key is None:
        raise RequestError("The request's API key isn't valid any more.", status=401)
    return key
