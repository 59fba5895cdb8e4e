"""The processes of one launch: marked by their environment, which all of them inherit, and in the
session of `serve run`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

MARK = "MANTA_LAUNCH_ID"
"""Environment variable that every process of one launch inherits. Some write their title over
their environment, Ray's agents over most or all of it, and one that ends or is replaced by another
program has none for a moment. So whoever must find all of them looks for the session, too."""
PATIENCE_S = {signal.SIGTERM: 0.3, signal.SIGKILL: 10.0}
"""Time for which processes get a signal. Ray's agents would take more than a second to end
themselves, and have nothing to save. What SIGKILL ends may need time to free its memory."""


def marked_processes(mark: str, session: int | None = None) -> list[int]:
    """Live processes other than this one whose environment holds the mark, wherever it does, or
    that are in the session."""
    found = []
    needle = os.fsencode(mark)
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        try:
            is_ours = needle in entry.joinpath("environ").read_bytes() or (
                session is not None and os.getsid(pid) == session
            )
            if is_ours and is_alive(pid):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and hasn't ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_marked_processes(mark: str, session: int | None = None) -> None:
    """End every process that is still of this launch: Ray's own, orphans. Requests have ended
    before, or can't be saved."""
    for number, patience_s in PATIENCE_S.items():
        deadline = time.monotonic() + patience_s
        while pids := marked_processes(mark, session):
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
