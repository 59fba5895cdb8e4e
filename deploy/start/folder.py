"""The folder of one launch, for Ray's session and HAProxy's files: private, short, removed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError

PREFIX = "manta-"
MAX_CHARS = 25
"""Sockets lie in the folder, and a socket's path holds 107 characters. HAProxy's are longest: Ray
appends a node id of 56 and a name of 12, HAProxy a process id and a suffix meanwhile."""
LOCK = ".manta-launch.lock"
_PLAIN = re.compile(r"[\w./+@%,:=-]*", re.ASCII)


class LaunchFolder(NamedTuple):
    """`lock_fd` is open and locked. The folder isn't removed while a process that inherited
    `lock_fd` lives."""

    path: Path
    lock_fd: int


@contextmanager
def launch_folder() -> Iterator[LaunchFolder]:
    """Make the folder. Also remove folders that killed launches left behind.

    Raises `ConfigError` if there is no place for it.
    """
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(parent)) + len("/manta-12345678") > MAX_CHARS or not is_plain(parent):
        parent = "/tmp"
    for folder in Path(parent).glob(PREFIX + "?" * 8):
        if _is_forsaken(folder):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no folder can be made in {parent} ({error.strerror}); set TMPDIR to one that is "
            "there and can be written."
        ) from error
    with made as name:
        new = Path(name) / "new"
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(name) / LOCK)  # the lock file is locked before it has its name
            yield LaunchFolder(Path(name), lock.fileno())


def is_plain(path: str) -> bool:
    """Whether a path can stand in a command line of Ray's or in HAProxy's configuration: both split
    at blanks and know quotes."""
    return _PLAIN.fullmatch(path) is not None


def plain_python(folder: Path) -> str:
    """This Python's program by a path that `is_plain`: of its environment's own, or of a link to
    the environment in `folder`. Ray starts its processes by command lines that it splits at
    blanks."""
    if is_plain(sys.executable):
        return sys.executable
    link = folder / "python"
    link.symlink_to(sys.prefix)
    return str(link / Path(sys.executable).relative_to(sys.prefix))


def _is_forsaken(folder: Path) -> bool:
    """Whether a launch of this user made the folder, and neither the launch nor its child lives any
    more. Then nobody holds the folder's lock."""
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held; or not a launch's folder
        return False
    return True
