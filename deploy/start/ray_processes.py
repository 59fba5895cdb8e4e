"""`RayProcesses`: the processes of Ray's own that nothing replaces on one machine."""

from __future__ import annotations

from pathlib import Path

import psutil

from deploy.start.processes import is_alive, marked_processes

NAMES = {"gcs_server": "GCS (gcs_server)", "raylet": "raylet"}
"""Without the first nobody can start or find an actor; with the second its machine's actors end."""


class RayProcesses:
    """Those of one launch, once they are found. A start of Ray brings all of them or fails."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._found: dict[str, int] = {}

    def find(self) -> None:
        """Look for them; call this once Ray runs."""
        programs = {pid: _program(pid) for pid in marked_processes(self._mark)}
        for pid, name in programs.items():
            # What one of them has just forked still has its name, until it becomes a worker.
            if name in NAMES and programs.get(_parent(pid)) != name:
                self._found[name] = pid

    def lost(self) -> str:
        """The first of them that has ended, in a sentence; "" while all live."""
        for name, pid in self._found.items():
            if not is_alive(pid):
                return (
                    f"Ray's {NAMES[name]}, process {pid}, has ended, and Ray can't go on without "
                    "it (killed, or out of memory: see dmesg). Start the server again."
                )
        return ""


def _parent(pid: int) -> int:
    """The number of a process's parent; 0 if the process has ended."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def _program(pid: int) -> str:
    """The name of the program that a process runs; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]
    except (OSError, UnicodeDecodeError):
        return ""
