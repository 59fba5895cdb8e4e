"""One server on this machine, from the first check to the last process.

What plain `serve run` lacks: checks before anything starts, ten lines instead of Ray's, a start
that fails ends with its cause, HAProxy is in front (`deploy.start.haproxy`), and whatever way it
ends, no process, port or file stays behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import yaml

from deploy.header_guard import IMPORT_PATH
from deploy.start import haproxy
from deploy.start.banner import loading_lines, ready_lines
from deploy.start.causes import cause_of, config_error_in, port_taken
from deploy.start.log_file import LaunchLog
from deploy.start.ports import PortBlock, hold_api_port
from deploy.start.preflight import check_machine
from deploy.start.processes import MARK, end_marked_processes
from deploy.start.target import Target

STOP_TIMEOUT_S = 45.0
POLL_S = 0.1
HEALTH_TIMEOUT_S = 2.0
PATIENCE_S = (20.0, 60.0, 180.0, 600.0)
"""A start that takes longer says so at these times."""
MAX_FOLDER_CHARS = 25
"""Sockets lie in the folder, and a socket's path holds 107 characters. HAProxy's are longest: Ray
appends a node id of 56 and a name of 12, HAProxy a process id and a suffix meanwhile."""
OUR_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL) ((?:engine|deploy)\.[\w.]+: .*)")
NOISE = "Task ServeController.graceful_shutdown failed."
"""Raylet's word for the end of Serve's controller, which ends itself whenever Serve stops."""
_LOCK = "launcher"
"""File in the folder that the launcher holds locked."""
_PR_SET_PDEATHSIG = 1


def serve(target: Target, *, use_haproxy: bool, verbose: bool) -> int:
    """Serve until Ctrl-C. Exit status: 0 after it, 1 if the start or the server failed.

    Raises `ConfigError` before anything was started.
    """
    with ExitStack() as stack:
        launch = Launch(target, use_haproxy, verbose, stack)
        return launch.run()


class Launch:
    """Everything that one server holds; `stack` lets go of it."""

    def __init__(self, target: Target, use_haproxy: bool, verbose: bool, stack: ExitStack) -> None:
        self._target = target
        self._host, self._port = str(target.http["host"]), int(target.http["port"])
        self._own_cluster = not os.environ.get("RAY_ADDRESS")
        binary = haproxy.binary() if use_haproxy else None
        if binary is not None:
            haproxy.check_host(self._host)
        stack.enter_context(hold_api_port(self._host, self._port))
        warnings = check_machine(target) if self._own_cluster else []
        if use_haproxy and binary is None:
            warnings.append("there is no HAProxy for this platform: using Serve's own proxy")
        self._log, problem = _open_log(self._port, stack)
        self._verbose = verbose or self._log is None
        self._folder = Path(stack.enter_context(private_folder()))
        self._settings = {haproxy.SWITCH: "0"}
        if binary is not None:
            ports = stack.enter_context(PortBlock())
            self._settings = haproxy.environment(binary, self._folder, target.http, ports)
        self._mark = uuid.uuid4().hex
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._failure = ""
        log = self._log.path if self._log is not None else None
        say(*loading_lines(target, log, warnings + problem))

    def run(self) -> int:
        """Exit status of the launch."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, self._on_signal)
        status_in, status_out = os.pipe()
        child = self._start(status_out)
        os.close(status_out)
        output = _Output(child, self._log, self._verbose)
        output.start()
        status = _Status(status_in)
        status.start()
        try:
            if self._wait_ready(child, status, output):
                say(*ready_lines(self._target, time.monotonic() - self._started))
                while child.poll() is None and not self._stop.is_set():
                    self._stop.wait(POLL_S)
            if not self._stop.is_set() and not self._failure:
                self._failure = f"`serve run` ended by itself (status {child.poll()})"
            if not self._failure:
                say("stopping (Ctrl-C again: at once)")
            self._end(child)
        finally:
            end_marked_processes(self._mark)
        output.join(2.0)
        return self._report_end(output)

    def _start(self, status_fd: int) -> subprocess.Popen[str]:
        config = self._folder / "serve.yaml"
        config.write_text(yaml.safe_dump(self._target.config))
        root = Path(__file__).resolve().parents[2]
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.start.serve_run", str(config), str(status_fd)],
            env=self._environment(),
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[status_fd],
            # Its own session: a Ctrl-C reaches only the launcher, which passes it on once.
            start_new_session=True,
            preexec_fn=prepare_child,
        )

    def _environment(self) -> dict[str, str]:
        """What the environment has already wins, but for HAProxy's switch and its wrapper."""
        ours = (haproxy.SWITCH, haproxy.BINARY_PATH)
        env = {
            **self._settings,
            **os.environ,
            **{name: self._settings[name] for name in ours if name in self._settings},
            MARK: self._mark,
        }
        if self._own_cluster:
            env["RAY_TMPDIR"] = env["TMPDIR"] = str(self._folder)
        env.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", IMPORT_PATH)
        # Read by libgomp at process start: threads that spin while waiting starve the other roles.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Ray runs actors at niceness 15: whatever else the machine does would come first.
        env.setdefault("RAY_worker_niceness", "0")
        env.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
        # Serve's 5 s are too few on a busy machine, and a proxy that misses them ends the start.
        env.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")
        return env

    def _wait_ready(self, child: subprocess.Popen[str], status: _Status, output: _Output) -> bool:
        """Until `/health` says 200: True. False if it never will, or a stop was asked for."""
        reminders = list(PATIENCE_S)
        while child.poll() is None and not self._stop.is_set():
            if failure := output.config_error or cause_of(status.failure) or status.failure:
                self._failure = failure
                return False
            if self._settings[haproxy.SWITCH] == "1" and (taken := port_taken(self._folder)):
                self._failure = taken
                return False
            if status.is_running and self._is_healthy():
                return True
            waited = time.monotonic() - self._started
            if reminders and waited > reminders[0]:
                say(f"still starting after {reminders.pop(0):.0f} s ({status.summary})")
            self._stop.wait(POLL_S)
        return False

    def _is_healthy(self) -> bool:
        host = "127.0.0.1" if self._host == haproxy.ALL_INTERFACES else self._host
        prefix = str(self._target.config["applications"][0].get("route_prefix", "/")).rstrip("/")
        connection = http.client.HTTPConnection(host, self._port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", f"{prefix}/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet
            return False
        finally:
            connection.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _end(self, child: subprocess.Popen[str]) -> None:
        """Let Serve stop its replicas, for at most `STOP_TIMEOUT_S`. At once after a second Ctrl-C,
        and where nothing was served."""
        if child.poll() is not None:
            return
        child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + (0.0 if self._failure else STOP_TIMEOUT_S)
        while child.poll() is None and time.monotonic() < deadline and not self._hurry.is_set():
            time.sleep(POLL_S)
        if child.poll() is None:
            child.kill()
            child.wait()

    def _report_end(self, output: _Output) -> int:
        if not self._failure:
            return 0
        if self._failure.startswith("`serve run`"):
            self._failure = cause_of("".join(output.last_lines)) or self._failure
        if self._log is not None:
            self._keep_other_logs(self._log)
            say(f"full log: {self._log.path}", to=sys.stderr)
        say(f"error: {self._failure}", to=sys.stderr)
        return 1

    def _keep_other_logs(self, log: LaunchLog) -> None:
        """The errors that Ray's and HAProxy's processes kept to themselves, before they go."""
        rays = self._folder.glob("ray/session_2*/logs/*.err")
        found = [file for file in rays if not file.name.startswith("worker-")]  # those are here
        for file in sorted([*found, *self._folder.glob("*/*.stderr.log")]):
            lines = file.read_text(errors="replace").splitlines()[-100:]
            if lines:
                log.write(f"--- {file.relative_to(self._folder)} ends:")
            for line in lines:
                log.write(line)


class _Output(threading.Thread):
    """Copies the child's output to the log, and what matters of it to the terminal."""

    def __init__(self, child: subprocess.Popen[str], log: LaunchLog | None, verbose: bool) -> None:
        super().__init__(daemon=True)
        self._child = child
        self._log = log
        self._verbose = verbose
        self.last_lines: list[str] = []
        self.config_error = ""

    def run(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if NOISE in line:
                continue
            if self._log is not None:
                self._log.write(line)
            self.last_lines = [*self.last_lines[-49:], line]
            self.config_error = self.config_error or config_error_in(line)
            if self._verbose:
                say(line.rstrip("\n"), to=sys.stderr)
            elif match := OUR_WARNING.search(line):
                say(f"{match[1].lower()}: {match[2]}", to=sys.stderr)


class _Status(threading.Thread):
    """How the deployment fares, as the child tells."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self._fd = fd
        self.failure = ""
        self.is_running = False
        self.summary = "Ray is being started"

    def run(self) -> None:
        with open(self._fd) as lines:
            for line in lines:
                self._take(json.loads(line))

    def _take(self, applications: dict[str, dict[str, Any]]) -> None:
        states = {app["status"] for app in applications.values()}
        for app in applications.values():
            if app["status"] == "DEPLOY_FAILED":
                self.failure = app["message"] or "the deployment failed without a word"
        if states:
            self.summary = f"Serve says {', '.join(sorted(states))}"
        self.is_running = states == {"RUNNING"}


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines at once. A terminal that is gone doesn't end the server."""
    with suppress(BrokenPipeError):
        print(*lines, sep="\n", file=to or sys.stdout, flush=True)


@contextmanager
def private_folder() -> Iterator[str]:
    """A folder for this user alone, with a short path, for Ray's session and HAProxy's files.

    Removes those of launches that were killed before they could.
    """
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(parent) + len("/manta-12345678") > MAX_FOLDER_CHARS:
        parent = "/tmp"
    for folder in Path(parent).glob("manta-*"):
        if _is_forsaken(folder):
            shutil.rmtree(folder, ignore_errors=True)
    made = tempfile.TemporaryDirectory(prefix="manta-", dir=parent, ignore_cleanup_errors=True)
    with made as name, (Path(name) / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(lock.name).rename(Path(name) / _LOCK)  # never there without being locked
        yield name


def _is_forsaken(folder: Path) -> bool:
    """Whether a launch of this user made the folder and lives no more: nobody holds its lock."""
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held; not a launch's folder; another user's
        return False
    return True


def prepare_child() -> None:
    """Let `serve run` hear Ctrl-C, also where the launcher was started with it ignored (as shells
    start what runs in their background), and get it if the launcher itself is killed (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _open_log(port: int, stack: ExitStack) -> tuple[LaunchLog | None, list[str]]:
    try:
        log = LaunchLog(port)
    except OSError as error:
        return None, [f"no log file ({error}); everything is printed here. Set MANTA_LOG_DIR"]
    stack.callback(log.close)
    return log, []
