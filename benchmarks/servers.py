"""Servers under test: started in a process group of their own, waited for, and stopped again."""

from __future__ import annotations

import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchmarks.common import REPO_ROOT

POLL_S = 0.2
PROBE_TIMEOUT_S = 5.0
LEFTOVER_GRACE_S = 2.0
LOG_TAIL_LINES = 40
PORTS = range(10_000, 12_000)


class ServerError(RuntimeError):
    """A server did not get ready; the message ends with the tail of its log."""


class ManagedServer:
    """A command that serves HTTP on 127.0.0.1:`port` for as long as the `with` block lasts.

    Entering waits until `GET ready_path` answers 200. Leaving sends SIGINT to the process, as
    Ctrl-C would, and after `stop_timeout_s` SIGKILL to its group and its other descendants. Its
    output goes to a temporary file, which is shown when it fails. Raises `ServerError` if the
    command ends or is not ready within `timeout_s` seconds.
    """

    def __init__(
        self,
        cmd: Sequence[str],
        env: Mapping[str, str] | None,
        port: int,
        ready_path: str = "/health",
        timeout_s: float = 120.0,
        stop_timeout_s: float = 60.0,
        certificate: str | None = None,
    ) -> None:
        """`certificate`: the file of the one that it serves https with, if it does."""
        self.cmd = list(cmd)
        self.port = port
        self.base_url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{port}"
        self._tls = None if certificate is None else ssl.create_default_context(cafile=certificate)
        self.ready_s = 0.0
        """Seconds from start to the first 200, set on entering."""
        self.killed: list[str] = []
        """What SIGKILL was needed for: the process, or others that outlived it, each with its
        state."""
        self._env = None if env is None else dict(env)
        self._ready_url = self.base_url + ready_path
        self._timeout_s = timeout_s
        self._stop_timeout_s = stop_timeout_s

    def __enter__(self) -> ManagedServer:
        self._log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")
        started = time.monotonic()
        self._process = subprocess.Popen(
            self.cmd,
            cwd=REPO_ROOT,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            self._wait_ready(started + self._timeout_s)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the command, which is also its process group."""
        return self._process.pid

    def stop(self) -> None:
        """Stop the process and all that it started. Does nothing the second time."""
        if self._log.closed:
            return
        family = _family(self.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + self._stop_timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._process.poll() is None:
            family |= _family(self.pid)
        else:
            deadline = time.monotonic() + LEFTOVER_GRACE_S
            while self._leftovers(family) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for pid in self._leftovers(family):
            self.killed.append(_describe(pid))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()  # where there is no /proc
        self._process.wait()
        self._log.close()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that the server printed, while it runs."""
        with Path(self._log.name).open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, maxlen=lines))

    def cpu_seconds(self) -> float:
        """CPU time of the server and all its descendants alive now, user and system, in seconds.

        Linux only: 0.0 elsewhere. Time of children that have ended counts once they are reaped.
        """
        ticks = sum(process.cpu_ticks for process in _family(self.pid).values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def _leftovers(self, family: dict[int, _Process]) -> list[int]:
        """Members of `family` or of the process group that still run."""
        return [
            pid
            for pid, process in _processes().items()
            if process.group == self.pid
            or (pid in family and process.started == family[pid].started)
        ]

    def _wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise self._failure(f"ended with status {status} before it was ready")
            if self._is_ready():
                return
            time.sleep(POLL_S)
        raise self._failure(f"was not ready after {self._timeout_s:g} s")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                self._ready_url, timeout=PROBE_TIMEOUT_S, context=self._tls
            ) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):  # not listening yet, or not healthy yet
            return False

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"`{' '.join(self.cmd)}` {what}; its log ends:\n{self.log_tail()}")


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that `with` blocks still stop their servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on right now.

    It lies below the ephemeral ports, of which any process may get one a moment later, and below
    the blocks that launches take.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError(f"all ports from {PORTS.start} to {PORTS.stop - 1} are taken")


def manta_server(
    overrides: Mapping[str, object] | None = None,
    config: str = "configs/llama.yaml",
    timeout_s: float = 180.0,
    haproxy: bool = True,
) -> ManagedServer:
    """This project's own server with `config` and `--set key=value` overrides of it.

    It listens on the port that the environment variable MANTA_PORT names, else on a free one.
    """
    port = int(os.environ.get("MANTA_PORT") or free_port())
    command = [sys.executable, "-m", "deploy.launch", config, "--port", str(port), "--verbose"]
    for key, value in (overrides or {}).items():
        command += ["--set", f"{key}={value}"]
    if not haproxy:
        command.append("--no-haproxy")
    return ManagedServer(command, None, port, timeout_s=timeout_s)


class _Process(NamedTuple):
    """A running process as Linux reports it. `started` shows whether its id was reused."""

    parent: int
    group: int
    cpu_ticks: int
    started: int


def _processes() -> dict[int, _Process]:
    """All processes that still run, by id; empty where there is no /proc."""
    processes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if state not in "ZX":
            values = [int(field) for field in fields[:19]]
            processes[int(stat.parent.name)] = _Process(
                parent=values[0], group=values[1], cpu_ticks=sum(values[10:14]), started=values[18]
            )
    return processes


def _describe(pid: int) -> str:
    """A process' id, state and command line, for messages."""
    folder = Path("/proc") / str(pid)
    try:
        state = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid} (has ended)"
    return f"{pid} ({state}) {command[:200]}"


def _heed_interrupts() -> None:
    """Make this child obey SIGINT: shells start programs in their background with SIGINT ignored,
    and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _family(pid: int) -> dict[int, _Process]:
    """Process `pid` and all its descendants."""
    processes = _processes()
    family = {pid} & processes.keys()
    while True:
        children = {p for p, process in processes.items() if process.parent in family}
        if children <= family:
            return {member: processes[member] for member in family}
        family |= children
