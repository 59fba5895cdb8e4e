"""The full log of one launch: everything that Ray, Serve, HAProxy and our own processes print."""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import time
from pathlib import Path

MAX_BYTES = 16 * 2**20
BACKUPS = 3
LAUNCHES_KEPT = 20
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def log_folder() -> Path:
    """`MANTA_LOG_DIR`, or `manta/logs` in the user's folder for state (XDG), never a temporary
    one: a log is needed when everything else is gone."""
    named = os.environ.get("MANTA_LOG_DIR")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "manta" / "logs"


class LaunchLog:
    """Lines to a file that rotates; the files of the last `LAUNCHES_KEPT` launches are kept."""

    def __init__(self, port: int) -> None:
        """Raises `OSError` if the file can't be written."""
        folder = log_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_old(folder)
        started = time.strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"manta-{started}-port{port}-{os.getpid()}.log"
        self._handler = logging.handlers.RotatingFileHandler(
            self.path, maxBytes=MAX_BYTES, backupCount=BACKUPS, encoding="utf-8", errors="replace"
        )
        self.path.chmod(0o600)

    def write(self, line: str) -> None:
        """Append one line, without its colours."""
        text = ANSI.sub("", line.rstrip("\n"))
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """No more lines."""
        self._handler.close()


def _forget_old(folder: Path) -> None:
    launches = sorted(folder.glob("manta-*.log"), key=lambda path: path.name)
    for log in launches[: max(0, len(launches) - LAUNCHES_KEPT + 1)]:
        for file in folder.glob(log.name + "*"):
            file.unlink(missing_ok=True)
