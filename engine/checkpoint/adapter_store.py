"""`AdapterStore`: copies of adapters by their content, in the user's folder for caches.

What lies at an adapter's path may be replaced while requests use it. So every version that is taken
is copied first, checked, and read from the copy from then on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from engine.checkpoint.adapter import CONFIG_NAME, WEIGHTS_NAME, PeftAdapter
from engine.errors import ConfigError
from engine.process.folders import FOLDER_VARIABLE, cache_folder, move_into_place
from engine.protocol.adapters import AdapterRef

KEEP_S = 7 * 24 * 3600.0
"""Copies that nobody took or read for so long are removed when another one is made."""
_BLOCK = 1 << 20


def take_adapter(name: str, folder: Path, max_rank: int, within: Path | None = None) -> AdapterRef:
    """Copy the adapter in `folder` as it is now. Its files must lie below `within`, wherever links
    lead, unless that is None. Raises `ConfigError` if it can't be served."""
    PeftAdapter.open(folder).check_rank(max_rank)  # before anything is copied
    files = {part: folder / part for part in (CONFIG_NAME, WEIGHTS_NAME)}
    for file in files.values():
        if within is not None and not file.resolve().is_relative_to(within.resolve()):
            raise ConfigError(f"{file} leads out of {within}, where adapters may lie.")
    place = _place()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=place))
    except OSError as error:
        raise _no_place(error) from error
    try:
        digest = hashlib.sha256()
        for part, file in files.items():
            size = _copy(file, made / part, digest)
            digest.update(f"\0{size}\0".encode())
        # Of the copy, which nobody changes.
        PeftAdapter.open(made).check_rank(max_rank)
        ref = AdapterRef(name, digest.hexdigest()[:32], str(folder))
        move_into_place(made, place / ref.digest)
        _touch(place / ref.digest)
    except OSError as error:
        raise _no_place(error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_old(place)
    return ref


def open_adapter(ref: AdapterRef) -> PeftAdapter:
    """The adapter of this very version: its copy, or, where there is none yet, what lies at its
    path on this machine. Raises `ConfigError` if neither has the version."""
    copy = _place() / ref.digest
    if not copy.is_dir():
        found = take_adapter(ref.name, Path(ref.path), 1 << 30)
        if found.digest != ref.digest:
            raise ConfigError(
                f"adapter '{ref.name}': {ref.path} holds another version than the one that was "
                "asked for, and there is no copy of that on this machine."
            )
    _touch(copy)
    return PeftAdapter.open(copy)


def _place() -> Path:
    try:
        return cache_folder() / "adapters"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no home folder to keep adapters in; set {FOLDER_VARIABLE}."
        ) from error


def _copy(file: Path, to: Path, digest: hashlib._Hash) -> int:
    size = 0
    try:
        source = file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file} can't be read ({error.strerror}).") from error
    with source, to.open("wb") as target:
        while block := source.read(_BLOCK):
            target.write(block)
            digest.update(block)
            size += len(block)
    return size


def _touch(copy: Path) -> None:
    try:
        os.utime(copy)
    except FileNotFoundError as error:
        raise ConfigError(f"{copy} was removed meanwhile; load the adapter again.") from error


def _remove_old(place: Path) -> None:
    oldest = time.time() - KEEP_S
    for copy in place.iterdir():
        try:
            is_old = copy.stat().st_mtime < oldest
        except FileNotFoundError:  # another process removed it
            continue
        if is_old:
            shutil.rmtree(copy, ignore_errors=True)


def _no_place(error: OSError) -> ConfigError:
    return ConfigError(
        f"adapters can't be kept ({error.strerror}: {error.filename}); set {FOLDER_VARIABLE} to a "
        "folder that can be written and has room."
    )
