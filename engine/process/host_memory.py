"""How much of the host's memory is free, what is given back to it, and how many cores it has."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import psutil


def available_host_bytes() -> int:
    """Bytes that can be taken without swapping, within the container's limit if it has one."""
    available = int(psutil.virtual_memory().available)
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - (used - _reclaimable())))
    return available


def give_back_freed() -> None:
    """Return to the system what was freed: glibc keeps tens of MiB for later. Elsewhere nothing
    happens."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reclaimable() -> int:
    """Bytes of page cache that count as used but are freed when a program needs the memory (as
    kubelet counts). Most of it can be a model that was just downloaded."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no cgroup v2 here
        return None
    return int(text) if text.isdigit() else None
