"""The library of CPU kernels in this process: found, built if necessary, and loaded once."""

from __future__ import annotations

import importlib.util
import logging
import threading
from pathlib import Path
from types import ModuleType

from engine.errors import ConfigError
from engine.native.build import SOURCE_DIR, build, cache_entry
from engine.native.cache import cache_folder
from engine.native.compiler import find_compiler
from engine.native.errors import BuildError, NoCompilerError
from engine.native.key import MODULE, installed_torch, library_stem
from engine.native.machine import (
    SWITCH,
    is_switched_off,
    unsuitable_platform,
    unsuitable_processor,
)

logger = logging.getLogger(__name__)

SHIPPED_DIR = Path(__file__).resolve().parent / "lib"
"""Where `python -m engine.native.build --into` puts a library for a wheel or an image."""


class KernelLibrary:
    """Loads the library at most once. Threads may share it."""

    def __init__(self, source_dir: Path = SOURCE_DIR, shipped_dir: Path = SHIPPED_DIR) -> None:
        self._source_dir = source_dir
        self._shipped_dir = shipped_dir
        self._lock = threading.Lock()
        self._is_done = False
        self._module: ModuleType | None = None
        self._reason = ""

    def load(self) -> ModuleType | None:
        """The module, or None with one warning. The first call may compile for a minute."""
        with self._lock:
            if not self._is_done:
                self._load()
                self._is_done = True
            return self._module

    @property
    def reason(self) -> str:
        """Why `load` has returned None; "" if it has not."""
        return self._reason

    def needs_build(self) -> bool:
        """Whether `load` would compile. Doesn't import torch."""
        if is_switched_off() or unsuitable_platform() or unsuitable_processor():
            return False
        try:
            stem = library_stem(self._source_dir, installed_torch())
            if self._shipped(stem) is not None:
                return False
            entry = cache_entry(stem, find_compiler())
            return not entry.library.is_file() and entry.failure() is None
        except BuildError:
            return False

    def lack(self) -> str:
        """Why `load` will surely find no library; "" if it may. Doesn't import torch."""
        if is_switched_off():
            return f"{SWITCH} switches them off"
        if why := unsuitable_platform() or unsuitable_processor():
            return why
        try:
            stem = library_stem(self._source_dir, installed_torch())
            if self._shipped(stem) is None and _built_earlier(stem) is None:
                failure = cache_entry(stem, find_compiler()).failure()
                return "" if failure is None else str(failure)
        except BuildError as error:
            return str(error)
        return ""

    def _load(self) -> None:
        if is_switched_off():
            self._reason = f"{SWITCH} switches them off"
            logger.info("no CPU kernels: %s", self._reason)
            return
        try:
            self._module = self._find_and_import()
        except BuildError as error:
            self._reason = str(error)
            logger.warning("no CPU kernels, computing is slower: %s", error)

    def _find_and_import(self) -> ModuleType:
        if why := unsuitable_platform() or unsuitable_processor():
            raise BuildError(why, f"nothing can be done; {SWITCH}=off stops this warning")
        stem = library_stem(self._source_dir, installed_torch())
        shipped, problem = self._shipped(stem), None
        if shipped is not None:
            try:
                return _import(shipped)
            except BuildError as error:  # made with another libc, say: a build here may do
                problem = error
        try:
            file = build(self._source_dir)
        except NoCompilerError as error:
            earlier = _built_earlier(stem)
            if earlier is None:
                raise problem or error from None
            file = earlier
        return _import(file)

    def _shipped(self, stem: str) -> Path | None:
        file = self._shipped_dir / f"{stem}.so"
        return file if file.is_file() else None


def load() -> ModuleType | None:
    """The library of CPU kernels. None, with one warning in the log, if it can't be had, and with
    a message if the user has switched it off. `reason` tells why."""
    return _LIBRARY.load()


def reason() -> str:
    """Why `load` has returned None; "" if it has not."""
    return _LIBRARY.reason


def needs_build() -> bool:
    """Whether `load` would compile, which takes a minute. Doesn't import torch."""
    return _LIBRARY.needs_build()


def lack() -> str:
    """Why `load` will surely return None; "" if it may find a library. Doesn't import torch."""
    return _LIBRARY.lack()


def require_kernels(key: str = "kernels") -> ModuleType:
    """The library of CPU kernels. Raises `ConfigError` with the reason if it can't be had.

    `key` is the configuration's key whose value cpu asks for it.
    """
    kernels = load()
    if kernels is None:
        raise without_kernels(key, "cpu", reason())
    return kernels


def without_kernels(key: str, value: str, reason: str) -> ConfigError:
    """The error of a configuration's `key` whose `value` needs the library, which can't be had for
    this `reason`."""
    other = "auto" if key == "quantization" else "torch"
    return ConfigError(
        f"{key} {value} needs the library of CPU kernels: {reason}. {key}: {other} runs without it."
    )


def _built_earlier(stem: str) -> Path | None:
    """A library in the cache by a compiler that isn't there any more."""
    return next(iter(sorted(cache_folder().glob(f"{stem}-*.so"))), None)


def _import(file: Path) -> ModuleType:
    """Import a library. Raises `BuildError` if it doesn't fit this process."""
    import torch  # noqa: F401  (the library needs torch's libraries, which this loads)

    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{file} can't be loaded ({error})", "remove it, then restart") from error
    return module


_LIBRARY = KernelLibrary()
