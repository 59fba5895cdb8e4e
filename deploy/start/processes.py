"""The processes of one launch: marked by an environment variable that all of them inherit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARK = "MANTA_LAUNCH_ID"
"""Environment variable that every process of one launch inherits."""
PATIENCE_S = 3.0
"""Time between asking a process to end and the next, harder signal."""


def marked_processes(mark: str) -> list[int]:
    """Live processes other than this one whose environment holds the mark."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            # Bytes: a process may have any name.
            alive = entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
            if alive and needle in entry.joinpath("environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def end_marked_processes(mark: str) -> None:
    """End every process that still carries this launch's mark (Ray's children, orphans)."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + PATIENCE_S
        while pids := marked_processes(mark):
            if number:
                for pid in pids:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        else:
            return
