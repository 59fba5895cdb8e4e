"""`AdapterCatalog`: the adapters that an engine's requests may name, each as it is now."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.checkpoint.adapter import CONFIG_NAME, WEIGHTS_NAME, check_adapter_name
from engine.checkpoint.adapter_store import take_adapter
from engine.errors import ConfigError
from engine.protocol.adapters import AdapterRef

_Signature = tuple[tuple[int, int, int], ...]
"""(inode, size, mtime) of an adapter's files."""


class Keys(Protocol):
    """Those of `engine.config.EngineConfig` that are about adapters."""

    lora_adapters: dict[str, str]
    lora_folder: str | None
    max_lora_rank: int

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have adapters."""


class AdapterCatalog:
    """Those that are listed have the version that they had at the start. Those of a folder are read
    when they are asked for, and again when their files have changed."""

    def __init__(self, listed: dict[str, str], folder: str | None, max_rank: int) -> None:
        """Raises `ConfigError` if a listed adapter can't be served."""
        self._max_rank = max_rank
        self._folder = None if folder is None else Path(folder)
        self._refs = {name: take_adapter(name, Path(at), max_rank) for name, at in listed.items()}
        self._seen: dict[str, tuple[_Signature, AdapterRef]] = {}

    @classmethod
    def of(cls, engine: Keys) -> AdapterCatalog | None:
        """Those of a configuration; None if requests can't have any. Raises `ConfigError`."""
        if not engine.has_adapters:
            return None
        return cls(engine.lora_adapters, engine.lora_folder, engine.max_lora_rank)

    def find(self, name: str) -> AdapterRef | None:
        """The adapter `name`; None if there is none. Raises `ConfigError` if it can't be served. It
        may read a file of any size."""
        listed = self._refs.get(name)
        if listed is not None or self._folder is None or name not in self._in_folder():
            return listed
        folder = self._folder / name
        try:
            now = _signature(folder)
        except OSError as error:
            raise ConfigError(f"adapter '{name}': {error.filename}: {error.strerror}.") from error
        known = self._seen.get(name)
        if known is None or known[0] != now:
            known = self._seen[name] = now, take_adapter(name, folder, self._max_rank, self._folder)
        return known[1]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._refs, *self._in_folder()})

    def _in_folder(self) -> set[str]:
        if self._folder is None:
            return set()
        found = set()
        for file in self._folder.glob(f"*/{CONFIG_NAME}"):
            name = file.parent.name
            try:
                check_adapter_name(name)
            except ConfigError:  # nobody can ask for it
                continue
            found.add(name)
        return found


def _signature(folder: Path) -> _Signature:
    stats = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
