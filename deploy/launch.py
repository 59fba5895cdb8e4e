"""`python -m deploy.launch configs/llama.yaml`: check the config, then `serve run` it.

What plain `serve run` lacks: a config error ends the start with one sentence (Serve retries,
then answers 404 for ever), a failed deployment ends the process, whatever way it ends, no
process stays behind, and HAProxy is in front (`deploy.haproxy`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from deploy import haproxy
from engine.errors import ConfigError

MARK = "MANTA_LAUNCH_ID"
"""Environment variable that every process of one launch inherits."""
FAILED_LINE = "failed with exception"
FAILED_STATUS = ("DEPLOY_FAILED", "Failed to update the deployments")
STOP_TIMEOUT_S = 45.0
_PR_SET_PDEATHSIG = 1
_APPLICATION_KEYS = {
    "name",
    "route_prefix",
    "import_path",
    "args",
    "runtime_env",
    "deployments",
    "external_scaler_enabled",
}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after Ctrl-C, 2 for a config error, 1 if the application failed."""
    options = _parse(argv)
    try:
        config = load(Path(options.config), options.set, options.host, options.port)
        http = config["http_options"]
        binary = haproxy.binary() if options.haproxy else None
        if binary is not None:
            haproxy.check_host(http.setdefault("host", haproxy.LOOPBACK[0]))
    except ConfigError as error:
        print(f"error: {options.config}: {error}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        # Set for both: the switch decides, whatever the environment says.
        env = {haproxy.SWITCH: "0"}
        if binary is not None:
            folder = stack.enter_context(haproxy.folder())
            env = haproxy.environment(binary, Path(folder), http)
        elif options.haproxy:
            print("there is no HAProxy for this platform: using Serve's own proxy", file=sys.stderr)
        file = stack.enter_context(
            tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="manta-")
        )
        yaml.safe_dump(config, file)
        file.flush()
        return _serve(file.name, env)


def load(
    path: Path, overrides: list[str], host: str | None = None, port: int | None = None
) -> dict[str, Any]:
    """A checked Serve config. Raises `ConfigError` naming what is wrong and what to do."""
    # Imports pydantic only now: `--help` stays quick.
    from deploy.config import AppConfig

    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"the file does not exist; see {path.parent}/ for others.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    if not isinstance(config, dict) or not config.get("applications"):
        raise ConfigError("a Serve config needs `applications:` with one application in it.")
    http = config.setdefault("http_options", {})
    if host is not None:
        http["host"] = host
    if port is not None:
        http["port"] = port
    for app in config["applications"]:
        unknown = set(app) - _APPLICATION_KEYS
        if unknown:
            # Serve ignores unknown keys here without a word.
            raise ConfigError(
                f"unknown application key '{sorted(unknown)[0]}'; known are "
                f"{', '.join(sorted(_APPLICATION_KEYS))}."
            )
        args = app.setdefault("args", {})
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise ConfigError(f"--set takes key=value, not '{override}'.")
            args[key] = yaml.safe_load(value)
        AppConfig.from_args(args)
    return config


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deploy.launch", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="Serve config file, e.g. configs/llama.yaml")
    parser.add_argument("--host", help="overrides http_options.host")
    parser.add_argument("--port", type=int, help="overrides http_options.port")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key of the application's args; may be repeated",
    )
    parser.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="HAProxy in front instead of Serve's Python proxy (default where Ray brings it)",
    )
    return parser.parse_args(argv)


def _serve(config: str, settings: dict[str, str]) -> int:
    """Run `serve run config` with `settings` in its environment until it ends or is told to.

    What the environment has already wins, but for HAProxy's switch.
    """
    mark = uuid.uuid4().hex
    env = {**settings, **os.environ, haproxy.SWITCH: settings[haproxy.SWITCH], MARK: mark}
    # Read by libgomp at process start: threads that spin while waiting starve the other roles.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ray runs actors at niceness 15: whatever else the machine does would come first.
    env.setdefault("RAY_worker_niceness", "0")
    env.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
    # Serve's 5 s are too few on a busy machine, and a proxy that misses them ends the start.
    env.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")
    root = Path(__file__).resolve().parent.parent
    child = subprocess.Popen(
        [sys.executable, "-m", "ray.serve.scripts", "run", "--app-dir", str(root), config],
        env=env,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Its own session: a Ctrl-C reaches only the launcher, which passes it on once.
        start_new_session=True,
        preexec_fn=_prepare_child,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    watcher = _OutputWatcher(child)
    watcher.start()
    try:
        while child.poll() is None and not stop.is_set() and not watcher.failed.is_set():
            stop.wait(0.2)
        failed = watcher.failed.is_set() or (child.poll() is not None and not stop.is_set())
        _stop(child)
    finally:
        _kill_marked(mark)
    if watcher.failed.is_set():
        print("error: the application failed to deploy; the cause is above.", file=sys.stderr)
    return 1 if failed else 0


class _OutputWatcher(threading.Thread):
    """Copies the child's output and notices Serve's word that the deployment failed."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._child = child
        self.failed = threading.Event()

    def run(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            sys.stderr.write(line)
            if any(word in line for word in FAILED_STATUS) or (
                "Deploying app" in line and FAILED_LINE in line
            ):
                self.failed.set()
        sys.stderr.flush()


def _stop(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _kill_marked(mark: str) -> None:
    """End every process that still carries this launch's mark (Ray's children, orphans)."""
    for number, patience in ((0, 3.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        deadline = time.monotonic() + patience
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


def marked_processes(mark: str) -> list[int]:
    """Live processes other than this one whose environment holds the mark."""
    found = []
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            alive = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and needle in entry.joinpath("environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def _prepare_child() -> None:
    """Let `serve run` hear Ctrl-C, also where the launcher was started with it ignored (as shells
    start what runs in their background), and get it if the launcher itself is killed (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
