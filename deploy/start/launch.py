"""One server on this machine, from the first check to the last process.

Beyond plain `serve run`: it checks before anything starts; it prints ten lines instead of Ray's; a
failed start ends with its cause; HAProxy is in front (`deploy.start.haproxy`); and after any end,
no process, port or file stays behind.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import sys
import time
from contextlib import ExitStack
from types import FrameType

import yaml

from deploy.http.access.listening import check_listening
from deploy.http.header_guard import IMPORT_PATH
from deploy.start import haproxy
from deploy.start.banner import loading_lines, reachable_host, ready_lines
from deploy.start.causes import cause_of, port_taken
from deploy.start.child import ServeRun, say
from deploy.start.cluster_token import TOKEN_PATH, check_cluster_token, token_file
from deploy.start.folder import LaunchFolder, launch_folder, plain_python
from deploy.start.kernels import build_kernels
from deploy.start.log_file import LaunchLog
from deploy.start.open_files import raise_open_files
from deploy.start.ports import PortBlock, hold_api_port
from deploy.start.preflight import check_machine
from deploy.start.processes import MARK, end_marked_processes
from deploy.start.ray_processes import RayProcesses
from deploy.start.target import Target
from deploy.start.tls import check_tls, scheme, without_tls

STOP_TIMEOUT_S = 45.0
POLL_S = 0.1
HEALTH_TIMEOUT_S = 2.0
HURRY_AFTER_S = 0.5
"""A second signal within this time counts as the first: a closed terminal and some wrappers send
each signal twice."""
REMINDERS_S = (20.0, 60.0, 180.0, 600.0)
"""A start that takes longer than these times prints a reminder at each of them."""


def serve(target: Target, *, use_haproxy: bool, verbose: bool) -> int:
    """Serve until Ctrl-C. Exit status: 0 after Ctrl-C, 1 if the start or the server failed.

    Raises `ConfigError` before anything is started.
    """
    with ExitStack() as stack:
        warnings = check(target, use_haproxy, stack)
        if _is_own_cluster():
            build_kernels(target)
        return Launch(target, use_haproxy, verbose, warnings, stack).run()


def check(target: Target, use_haproxy: bool, stack: ExitStack) -> list[str]:
    """Check all that can be known before a start. Returns sentences to tell the user; `stack` gets
    the resources that are held.

    Raises `ConfigError`. With a cluster that runs already (`RAY_ADDRESS`) less can be checked here.
    """
    host, port = str(target.http["host"]), int(target.http["port"])
    warnings = []
    check_tls(target.http)
    for app in target.applications:
        check_listening(app.server.api_keys_file, app.server.auth, host)
    if use_haproxy:
        if haproxy.binary() is None:
            warnings.append("there is no HAProxy for this platform: using Serve's own proxy")
        else:
            haproxy.check_host(host)
    if not _is_own_cluster():
        check_cluster_token(os.environ["RAY_ADDRESS"])
        return warnings
    stack.enter_context(hold_api_port(host, port))
    return [*raise_open_files(), *check_machine(target), *warnings]


class Launch:
    """One server and everything that it holds; `stack` releases it."""

    def __init__(
        self,
        target: Target,
        use_haproxy: bool,
        verbose: bool,
        warnings: list[str],
        stack: ExitStack,
    ) -> None:
        self._target = target
        self._host, self._port = str(target.http["host"]), int(target.http["port"])
        self._folder: LaunchFolder = stack.enter_context(launch_folder())
        self._settings = {haproxy.SWITCH: "0"}
        self._serve_config = target.config
        binary = haproxy.binary() if use_haproxy else None
        if binary is not None:
            ports = stack.enter_context(PortBlock())
            folder = self._folder.path
            self._settings = haproxy.environment(binary, folder, target.http, ports)
            self._serve_config = without_tls(target.config)
        self._log, problem = _open_log(self._port, stack)
        self._verbose = verbose or self._log is None
        self._token = token_file(self._folder.path) if _is_own_cluster() else None
        if self._token is not None:
            problem.append(
                "Ray can't keep its token in the home folder; `serve status` and `serve deploy` "
                f"need {TOKEN_PATH}={self._token}"
            )
        self._mark = str(self._folder.path)
        self._started = time.monotonic()
        # Plain values: a signal's handler could interrupt code that holds the lock of an Event.
        self._stopped_at: float | None = None
        self._hurry = False
        self._failure = ""
        self._ray: RayProcesses | None = None
        log = self._log.path if self._log is not None else None
        say(*loading_lines(target, log, warnings + problem))

    def run(self) -> int:
        """Start the server, wait for its end and return the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, self._on_signal)
        config = self._folder.path / "serve.yaml"
        config.write_text(yaml.safe_dump(self._serve_config))
        python = plain_python(self._folder.path)
        child = ServeRun(
            python, config, self._environment(), self._folder.lock_fd, self._log, self._verbose
        )
        try:
            if self._wait_ready(child):
                say(*ready_lines(self._target, time.monotonic() - self._started))
                while not child.is_over and self._stopped_at is None and not self._failure:
                    self._failure = self._ray_lost(child)
                    time.sleep(POLL_S)
            if self._stopped_at is None and not self._failure:
                ended = f"`serve run` ended by itself (status {child.process.returncode})"
                self._failure = cause_of("".join(child.output.last_lines)) or ended
            if not self._failure:
                say("stopping (Ctrl-C again: at once)")
            self._end(child)
        finally:
            end_marked_processes(self._mark, session=child.process.pid)
        child.output.join(2.0)
        return self._report_end()

    def _environment(self) -> dict[str, str]:
        """The child's environment. Variables that are set already win, except HAProxy's switch and
        its wrapper."""
        ours = (haproxy.SWITCH, haproxy.BINARY_PATH, haproxy.PEM)
        env = {
            **self._settings,
            **os.environ,
            **{name: self._settings[name] for name in ours if name in self._settings},
            MARK: self._mark,
        }
        if _is_own_cluster():
            env["RAY_TMPDIR"] = env["TMPDIR"] = str(self._folder.path)
            if self._token is not None:
                env[TOKEN_PATH] = str(self._token)
        env.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", IMPORT_PATH)
        # libgomp reads this at process start. Threads that spin while waiting starve other roles.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # By default Ray runs actors at niceness 15: all other programs would come first.
        env.setdefault("RAY_worker_niceness", "0")
        # By default Serve's controller looks ten times a second whether something has changed. That
        # and the GCS's answers take 5 % of a core; with this, 3 %.
        env.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
        env.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0.5")
        # Serve's 5 s are too few on a busy machine, and a proxy that misses them ends the start.
        env.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")
        # Three checks in a row must fail until Serve starts HAProxy again: 3 s, not 30.
        env.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
        return env

    def _wait_ready(self, child: ServeRun) -> bool:
        """Wait until `/health` answers with 200: True. False if the start has failed or a stop was
        asked for."""
        reminders = list(REMINDERS_S)
        while not child.is_over and self._stopped_at is None:
            self._failure = self._failure_of(child)
            if self._failure:
                return False
            # With `RAY_ADDRESS`, this machine may have no proxy.
            if child.status.is_running and (not _is_own_cluster() or self._is_healthy()):
                return True
            if reminders and time.monotonic() - self._started > reminders[0]:
                waited = reminders.pop(0)
                say(f"still starting after {waited:.0f} s ({child.status.summary})")
            time.sleep(POLL_S)
        return False

    def _failure_of(self, child: ServeRun) -> str:
        """Why the start can't succeed any more; "" while it can."""
        told = child.status.failure
        if failure := child.output.config_error or cause_of(told) or told:
            return failure
        if lost := self._ray_lost(child):
            return lost
        return port_taken(self._folder.path) if self._settings[haproxy.SWITCH] == "1" else ""

    def _ray_lost(self, child: ServeRun) -> str:
        """Which process of Ray's has ended, in a sentence. Serve would go on without it and answer
        503, and nothing would start the machine's Ray again."""
        if not _is_own_cluster() or not child.status.knows_ray:
            return ""
        if self._ray is None:
            self._ray = RayProcesses(self._mark)
            self._ray.find()
        return self._ray.lost()

    def _is_healthy(self) -> bool:
        prefix = str(self._target.config["applications"][0].get("route_prefix", "/")).rstrip("/")
        host = reachable_host(self._host)
        connection = self._connect(host)
        try:
            connection.request("GET", f"{prefix}/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet
            return False
        finally:
            connection.close()

    def _connect(self, host: str) -> http.client.HTTPConnection:
        """To the server, which is our own child: its certificate needs no check."""
        if scheme(self._target.http) == "http":
            return http.client.HTTPConnection(host, self._port, timeout=HEALTH_TIMEOUT_S)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(
            host, self._port, timeout=HEALTH_TIMEOUT_S, context=context
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
        elif number != signal.SIGHUP and now - self._stopped_at > HURRY_AFTER_S:
            self._hurry = True

    def _end(self, child: ServeRun) -> None:
        """Let Serve stop its replicas, for at most `STOP_TIMEOUT_S`. After a second Ctrl-C or a
        failure, kill it at once."""
        if child.is_over:
            return
        child.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + (0.0 if self._failure else STOP_TIMEOUT_S)
        while not child.is_over and time.monotonic() < deadline and not self._hurry:
            time.sleep(POLL_S)
        if not child.is_over:
            child.process.kill()
            child.process.wait()

    def _report_end(self) -> int:
        if not self._failure:
            return 0
        if self._log is not None:
            self._keep_other_logs(self._log)
            say(f"full log: {self._log.path}", to=sys.stderr)
        say(f"error: {self._failure}", to=sys.stderr)
        return 1

    def _keep_other_logs(self, log: LaunchLog) -> None:
        """Copy the errors in Ray's and HAProxy's own logs to `log`, before these are removed."""
        folder = self._folder.path
        rays = folder.glob("ray/session_2*/logs/*.err")
        found = [file for file in rays if not file.name.startswith("worker-")]  # `log` has those
        for file in sorted([*found, *folder.glob("*/*.stderr.log")]):
            lines = file.read_text(errors="replace").splitlines()[-100:]
            if lines:
                log.write(f"--- {file.relative_to(folder)} ends:")
            for line in lines:
                log.write(line)


def _is_own_cluster() -> bool:
    return not os.environ.get("RAY_ADDRESS")


def _open_log(port: int, stack: ExitStack) -> tuple[LaunchLog | None, list[str]]:
    try:
        log = LaunchLog(port)
    except (OSError, RuntimeError) as error:  # not writable; no home
        return None, [f"no log file ({error}); everything is printed here. Set MANTA_LOG_DIR"]
    stack.callback(log.close)
    return log, []
