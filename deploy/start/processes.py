"""The processes of one launch: marked by their environment, which all of them inherit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARK = "MANTA_LAUNCH_ID"
"""Environment variable that every process of one launch inherits. Ray's agents write their title
over much of their environment; what is left names the launch's folder. So that is the mark."""
PATIENCE_S = {signal.SIGTERM: 0.3, signal.SIGKILL: 1.0}
"""Time for which processes get a signal. Ray's agents would take more than a second to end
themselves, and have nothing to save."""


def marked_processes(mark: str) -> list[int]:
    """Live processes other than this one whose environment holds the mark, wherever it does."""
    found = []
    needle = os.fsencode(mark)
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            held = entry.joinpath("environ").read_bytes()
            if needle in held and is_alive(int(entry.name)):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and hasn't ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] != b"Z"  # bytes: a process may have any name


def end_marked_processes(mark: str) -> None:
    """End every process that still carries this launch's mark: Ray's own, orphans. Requests have
    ended before, or can't be saved."""
    for number, patience_s in PATIENCE_S.items():
        deadline = time.monotonic() + patience_s
        while pids := marked_processes(mark):
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
