"""`manta serve` as a person starts it: with a terminal and Ctrl-C; and the files left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.common import REPO_ROOT
from benchmarks.servers import free_port
from deploy.start.folder import MAX_CHARS
from deploy.start.processes import marked_processes

READY_LIMIT_S = 180.0
MANTA = [sys.executable, "-m", "deploy.start.cli"]
MODEL = "models/manta-small"
SMALL = ["--set", "max_total_tokens=8192"]


class Started:
    """`manta serve` in a process of its own; its terminal is read line by line."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self.logs = folder / "logs"
        # The path is short, or the launcher would choose another for its sockets.
        self.temporary = Path(f"/tmp/{secrets.token_hex(2)}")
        self.temporary.mkdir()
        assert len(f"{self.temporary}/manta-12345678") <= MAX_CHARS
        self.left: list[str] = []
        """Names left in the temporary folder, once the server has ended."""
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*MANTA, "serve", *arguments, "--port", str(self.port)],
            cwd=REPO_ROOT,
            env={
                **os.environ,
                "MANTA_LOG_DIR": str(self.logs),
                "TMPDIR": str(self.temporary),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_ready(self) -> float:
        """Seconds from the start to the line that says that it is ready."""
        while not any(line.startswith("try: ") for line in self.lines):
            assert self.process.poll() is None, "\n".join(self.lines)
            assert time.monotonic() - self.started < READY_LIMIT_S, "\n".join(self.lines)
            time.sleep(0.05)
        return time.monotonic() - self.started

    def stop(self) -> int:
        """Press Ctrl-C; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.wait_end()

    def wait_end(self) -> int:
        try:
            return self.process.wait(READY_LIMIT_S)
        finally:
            self.process.kill()
            self._reader.join()
            if self.temporary.exists():
                self.left = os.listdir(self.temporary)
                self._remove_temporary()

    def _remove_temporary(self) -> None:
        """What outlived a killed launcher for a moment may write there and remove it too."""
        until = time.monotonic() + 30.0
        while self.temporary.exists():
            try:
                shutil.rmtree(self.temporary)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    @property
    def log(self) -> str:
        (log,) = self.logs.glob("*.log")
        return log.read_text()

    def answers(self) -> bool:
        body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        return reply.status_code == 200


@contextmanager
def started(arguments: list[str], folder: Path) -> Iterator[Started]:
    launch = Started(arguments, folder)
    try:
        yield launch
    finally:
        launch.stop()


def assert_nothing_left(launch: Started, mark: str) -> None:
    assert marked_processes(mark) == [], "processes left behind"
    assert launch.left == [], "files left behind"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", launch.port)) != 0
