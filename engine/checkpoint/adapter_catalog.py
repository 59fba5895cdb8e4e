"""`AdapterCatalog`: the adapters that an engine's requests may name, each as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.adapter import CONFIG_NAME, WEIGHTS_NAME, check_adapter_name
from engine.checkpoint.adapter_store import take_adapter
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.protocol.adapters import AdapterRef

_Signature = tuple[tuple[int, int, int], ...]
"""(inode, size, mtime) of an adapter's files."""


class AdapterCatalog:
    """Those that are listed have the version that they had at the start. Those of a folder are read
    when they are asked for, and again when their files have changed. Those that were loaded by hand
    stay as they were then."""

    def __init__(
        self,
        listed: dict[str, str],
        folder: str | None,
        max_rank: int,
        load_folders: Sequence[str] = (),
    ) -> None:
        """Raises `ConfigError` if a listed adapter can't be served."""
        self._max_rank = max_rank
        self._load_folders = [Path(at) for at in load_folders]
        self.loaded: dict[str, AdapterRef] = {}
        """By name, those loaded by hand; whoever keeps them sets this."""
        self._folder = None if folder is None else Path(folder)
        self._refs = {name: take_adapter(name, Path(at), max_rank) for name, at in listed.items()}
        self._seen: dict[str, tuple[_Signature, AdapterRef]] = {}

    @classmethod
    def of(cls, engine: EngineConfig) -> AdapterCatalog | None:
        """Those of a configuration; None if requests can't have any. Raises `ConfigError`."""
        if not engine.has_adapters:
            return None
        return cls(
            engine.lora_adapters,
            engine.lora_folder,
            engine.max_lora_rank,
            engine.lora_load_folders,
        )

    @property
    def loads(self) -> bool:
        """Whether adapters may be loaded by hand."""
        return bool(self._load_folders)

    def check_name(self, name: str) -> None:
        """Raise `ConfigError` if no adapter can be loaded by hand as `name`."""
        check_adapter_name(name)
        if name in self._refs or self._is_in_folder(name):
            raise ConfigError(
                f"the configuration has an adapter '{name}'; call this one otherwise."
            )

    def take(self, name: str, path: str) -> AdapterRef:
        """The adapter at `path`, to be loaded by hand as `name`. It may read a file of any size.
        Raises `ConfigError` if the path isn't allowed or it can't be served."""
        folder = Path(path)
        within = next((at for at in self._load_folders if _lies_in(folder, at)), None)
        if within is None:
            raise ConfigError("adapters of this path may not be loaded (lora_load_folders).")
        return take_adapter(name, folder, self._max_rank, within)

    def at_hand(self, name: str) -> AdapterRef | None:
        """The adapter `name` if no file has to be read for it."""
        return self._refs.get(name) or self.loaded.get(name)

    def find(self, name: str) -> AdapterRef | None:
        """The adapter `name`; None if there is none. Raises `ConfigError` if it can't be served. It
        may read a file of any size."""
        listed = self.at_hand(name)
        if listed is not None or self._folder is None or not self._is_in_folder(name):
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

    def holds(self, name: str) -> bool:
        """Whether there is an adapter `name`, whatever it is worth."""
        return name in self._refs or name in self.loaded or self._is_in_folder(name)

    def names(self) -> list[str]:
        """All names, sorted. It reads the folder."""
        files = () if self._folder is None else self._folder.glob(f"*/{CONFIG_NAME}")
        found = {file.parent.name for file in files}
        return sorted({*self._refs, *self.loaded, *filter(_can_be_named, found)})

    def _is_in_folder(self, name: str) -> bool:
        if self._folder is None or "/" in name or not _can_be_named(name):
            return False
        return (self._folder / name / CONFIG_NAME).is_file()


def _can_be_named(name: str) -> bool:
    try:
        check_adapter_name(name)
    except ConfigError:
        return False
    return True


def _lies_in(folder: Path, within: Path) -> bool:
    """Whether `folder` is below `within`, wherever links and ".." lead."""
    return folder.is_absolute() and folder.resolve().is_relative_to(within.resolve())


def _signature(folder: Path) -> _Signature:
    stats = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
