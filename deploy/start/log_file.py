"""The full log of one launch: everything that Ray, Serve, HAProxy and our own processes print."""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import time
from io import TextIOWrapper
from pathlib import Path

import psutil
from platformdirs.unix import Unix

MAX_BYTES = 16 * 2**20
BACKUPS = 3
LAUNCHES_KEPT = 20
_NAME = re.compile(r"manta-\d{8}-\d{6}-port\d+-\d+\.log")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def log_folder() -> Path:
    """`MANTA_LOG_DIR`, or `manta/logs` in the user's folder for state (XDG). The folder is never a
    temporary one: a log is needed when everything else is gone."""
    named = os.environ.get("MANTA_LOG_DIR")
    return Path(named) if named else Unix("manta").user_state_path / "logs"


class LaunchLog:
    """Writes lines to a file that rotates. The files of the last `LAUNCHES_KEPT` launches stay."""

    def __init__(self, port: int) -> None:
        """Open the file. Raises `OSError` if it can't be written."""
        folder = log_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_old(folder)
        started = time.strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"manta-{started}-port{port}-{os.getpid()}.log"
        self._handler = _PrivateFiles(
            self.path, maxBytes=MAX_BYTES, backupCount=BACKUPS, encoding="utf-8", errors="replace"
        )

    def write(self, line: str) -> None:
        """Append one line; codes for colours are removed."""
        text = ANSI.sub("", line.rstrip("\n"))
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        self._handler.close()


class _PrivateFiles(logging.handlers.RotatingFileHandler):
    """A rotating file; only this user may read it and the files that follow it."""

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=private,
        )


def _forget_old(folder: Path) -> None:
    """Remove old logs. `LAUNCHES_KEPT` stay, the coming one included, and those of launches that
    still run."""
    found = sorted((file for file in folder.iterdir() if _NAME.fullmatch(file.name)), reverse=True)
    for log in found[LAUNCHES_KEPT - 1 :]:
        if not psutil.pid_exists(int(log.stem.rpartition("-")[2])):
            for file in folder.glob(log.name + "*"):
                file.unlink(missing_ok=True)
