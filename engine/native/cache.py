"""The folder in which built libraries are kept, with a lock and a memory of failures."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.native.errors import BuildError
from engine.process import folders
from engine.process.folders import FOLDER_VARIABLE

FAILURE_VALID_S = 3600.0
"""For how long a failed build isn't tried again by processes that only want the library."""


def cache_folder() -> Path:
    """`folders.cache_folder`. Raises `BuildError` if there is no home folder."""
    try:
        return folders.cache_folder()
    except RuntimeError as error:
        raise BuildError("there is no home folder", _advice()) from error


class CacheEntry:
    """The place of one library, whose file name starts with `name`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.library = folder / f"{name}.so"
        self.log = folder / "build.log"
        """What the compiler printed in the last build of any library."""
        self._name = name
        self._failure = folder / f"{name}.failed"

    def make_folder(self) -> None:
        """Raises `BuildError` if the folder can't be made or written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def failure(self) -> BuildError | None:
        """Why the last build failed, if that was less than `FAILURE_VALID_S` ago."""
        try:
            age = time.time() - self._failure.stat().st_mtime
            if age > FAILURE_VALID_S:
                return None
            noted = json.loads(self._failure.read_text())
            return BuildError(str(noted["cause"]), str(noted["remedy"]))
        except (OSError, ValueError, LookupError, TypeError):  # there is none
            return None

    def note_failure(self, error: BuildError) -> None:
        """Remember a failure, if the folder can be written."""
        with suppress(OSError):
            self._failure.write_text(json.dumps({"cause": error.cause, "remedy": error.remedy}))

    def store(self, library: Path) -> None:
        """Put a finished library in its place. `library` is in the same file system."""
        with library.open("rb") as file:
            os.fsync(file.fileno())  # its content is on the disk before its name is
        os.replace(library, self.library)
        self._failure.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the entry's lock. It is free again when its process dies."""
        with (self.folder / f"{self._name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another process, which builds the CPU kernels", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: two builds at once do no harm
                pass
            yield

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """A folder for a build; the lock must be held. Also removes folders of killed builds."""
        prefix = f"{self._name}.tmp-"
        for left in self.folder.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=self.folder, ignore_cleanup_errors=True
        ) as made:
            yield Path(made)


def unwritable(folder: Path, error: OSError) -> BuildError:
    """The error for a folder that can't be written."""
    return BuildError(f"{folder} can't be written ({error.strerror or error})", _advice())


def _advice() -> str:
    return f"set {FOLDER_VARIABLE} to a folder that can be written"
