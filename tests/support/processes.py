"""Processes of a running launch, found by the mark that all of them inherit."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deploy.start.processes import MARK, marked_processes


def launch_mark(launcher: int) -> str:
    """The mark that `deploy.launch` gave to all processes of this launch."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[1])
            environ = (
                entry.joinpath("environ").read_bytes().split(b"\0") if parent == launcher else []
            )
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for item in environ:
            if item.startswith(f"{MARK}=".encode()):
                return item.decode().partition("=")[2]
    raise AssertionError("the launcher has no marked child")


class SharedMemory:
    """What is new in /dev/shm since this was made, and no process uses."""

    def __init__(self) -> None:
        self._before = set(os.listdir("/dev/shm"))

    def left(self) -> set[str]:
        """Names. Other tests' processes may have some meanwhile."""
        found = set(os.listdir("/dev/shm")) - self._before
        for entry in Path("/proc").glob("[0-9]*") if found else ():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                uses = entry.joinpath("maps").read_text()
                uses += "".join(os.readlink(fd) + "\n" for fd in entry.joinpath("fd").iterdir())
                found = {name for name in found if f"/dev/shm/{name}" not in uses}
        return {name for name in found if Path("/dev/shm", name).exists()}


def actor_pids(mark: str, actor: str) -> list[int]:
    """Live processes of one kind of actor of a launch."""
    names = {pid: _command(pid) for pid in marked_processes(mark)}
    return [pid for pid, name in names.items() if actor in name]


def program_pids(mark: str, name: str) -> list[int]:
    """Live processes of a launch that run the program `name`."""
    commands = {pid: _command(pid).split("\0")[0] for pid in marked_processes(mark)}
    return [pid for pid, program in commands.items() if program.rpartition("/")[2] == name]


class Program(NamedTuple):
    """Command line options (`--name=value`) and environment of a process."""

    options: dict[str, str]
    environment: dict[str, str]


def find_program(mark: str, name: str) -> Program:
    """The process of a launch that runs the program `name`."""
    for pid in marked_processes(mark):
        program, *arguments = _command(pid).split("\0")
        if program.endswith(name):
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            return Program(
                dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a),
                dict(entry.split("=", 1) for entry in environ.split("\0") if "=" in entry),
            )
    raise AssertionError(f"no {name}")


def socket_count(pid: int) -> int:
    """Sockets that a process holds open."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(link.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def listening_ports(mark: str) -> set[int]:
    """TCP ports that processes of a launch listen on."""
    inodes: set[str] = set()
    for pid in marked_processes(mark):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def resident_mib(pid: int) -> float:
    """Memory of a process, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cpu_seconds_by_process(root: int) -> dict[str, float]:
    """CPU time of a process and all its descendants, by name and id."""
    found: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family: set[int] = set()
    grown = {root} & found.keys()
    while grown - family:
        family |= grown
        grown = {pid for pid, (parent, _) in found.items() if parent in family}
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        f"{' '.join(_command(pid).replace(chr(0), ' ').split()[:3])[-60:]} ({pid})": (
            found[pid][1] / ticks
        )
        for pid in family
    }
