"""Starts and stops of `manta serve`: what it prints, takes, leaves, and why it fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import REPO_ROOT
from benchmarks.servers import free_port
from deploy.start import ports
from deploy.start.launch import MAX_FOLDER_CHARS
from deploy.start.processes import marked_processes
from tests.integration.http_server import metric
from tests.integration.leaving import Client, Way
from tests.processes import launch_mark

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
        # Short, or the launcher would take another for its sockets' sake.
        self._temporary = Path(f"/tmp/{secrets.token_hex(2)}")
        self._temporary.mkdir()
        assert len(f"{self._temporary}/manta-12345678") <= MAX_FOLDER_CHARS
        self.left: list[str] = []
        """In the temporary folder, once it has ended."""
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*MANTA, "serve", *arguments, "--port", str(self.port)],
            cwd=REPO_ROOT,
            env={
                **os.environ,
                "MANTA_LOG_DIR": str(self.logs),
                "TMPDIR": str(self._temporary),
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
        """Seconds from the start to the line that says so."""
        while not any(line.startswith("try: ") for line in self.lines):
            assert self.process.poll() is None, "\n".join(self.lines)
            assert time.monotonic() - self.started < READY_LIMIT_S, "\n".join(self.lines)
            time.sleep(0.05)
        return time.monotonic() - self.started

    def stop(self) -> int:
        """Ctrl-C; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.wait_end()

    def wait_end(self) -> int:
        try:
            return self.process.wait(READY_LIMIT_S)
        finally:
            self.process.kill()
            self._reader.join()
            if self._temporary.exists():
                self.left = os.listdir(self._temporary)
                shutil.rmtree(self._temporary)

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


@pytest.fixture
def folder() -> Iterator[Path]:
    """For sockets' sake with a shorter path than pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def assert_nothing_left(launch: Started, mark: str) -> None:
    assert marked_processes(mark) == [], "processes left behind"
    assert launch.left == [], "files left behind"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", launch.port)) != 0


def test_ten_lines_to_ready_and_nothing_left(folder: Path) -> None:
    """Then what the curl that it prints says, what the log holds, and a second start beside it."""
    shared = set(os.listdir("/dev/shm"))
    with started([MODEL, *SMALL], folder) as launch:
        launch.wait_ready()
        mark = launch_mark(launch.process.pid)
        assert len(launch.lines) <= 10, launch.lines
        text = "\n".join(launch.lines)
        assert "manta-small" in text and launch.url in text and str(launch.logs) in text
        curl = next(line for line in launch.lines if line.startswith("try: "))
        ran = subprocess.run(curl.removeprefix("try: ") + " -s", shell=True, capture_output=True)
        assert json.loads(ran.stdout)["choices"][0]["text"]
        for path in ("/health", "/metrics"):
            assert httpx.get(launch.url + path, timeout=30).status_code == 200
        beside = subprocess.run(
            [*MANTA, "serve", "--port", str(launch.port)],
            cwd=REPO_ROOT,
            capture_output=True,
            text=True,
        )
        assert beside.returncode == 2 and beside.stdout == ""
        assert "Address already in use" in beside.stderr and beside.stderr.count("\n") == 1
        assert launch.answers()
        assert launch.stop() == 0
        assert "POST /v1/completions 200" in launch.log, "the full log has what Serve says"
        assert not re.search("GET /(health|metrics)", launch.log)
        assert "graceful_shutdown failed" not in launch.log
        assert_nothing_left(launch, mark)
    assert set(os.listdir("/dev/shm")) <= shared


def test_every_port_of_first_choice_is_taken(folder: Path) -> None:
    """The first block by one port; in the second those of the first replicas."""
    with ExitStack() as taken:
        first, second = ports.FIRST, ports.FIRST + ports.BLOCK
        for port in (
            first,
            *(second + ports.REPLICAS_FROM + i for i in range(3)),
            8404,
            9101,
            8500,
        ):
            try:
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:  # by somebody else: as good
                continue
        with started([MODEL, *SMALL], folder) as launch:
            launch.wait_ready()
            assert launch.answers()
            assert launch.stop() == 0


def test_a_stop_under_load_leaves_no_traceback(folder: Path) -> None:
    """Twenty clients wait for their answers when Ctrl-C comes."""
    settings = ["device=simulated", "drain_timeout_s=1", "max_total_tokens=1000000"]
    options = [word for setting in settings for word in ("--set", setting)]
    with started([MODEL, *options], folder) as launch:
        launch.wait_ready()
        mark = launch_mark(launch.process.pid)
        asyncio.run(ask_and_stop(launch))
        assert launch.process.returncode == 0
        assert "Traceback" not in launch.log, launch.log[launch.log.index("Traceback") - 2000 :]
        assert_nothing_left(launch, mark)


async def ask_and_stop(launch: Started) -> None:
    way = Way(2, False, "decode", False, "close")
    clients = [Client(launch.port, way, number, max_tokens=4000) for number in range(20)]
    await asyncio.gather(*(client.ask() for client in clients))
    await asyncio.sleep(1.0)
    assert metric(launch.url, "manta_engine_num_running") == 20
    launch.process.send_signal(signal.SIGINT)
    await asyncio.to_thread(launch.wait_end)


@pytest.mark.parametrize("what", ["tokenizer", "device"])
def test_a_start_that_fails_ends_with_its_cause(folder: Path, what: str) -> None:
    model = Path(shutil.copytree(REPO_ROOT / MODEL, folder / "model"))
    arguments = [str(model), *SMALL]
    if what == "tokenizer":
        (model / "tokenizer.json").write_text("{}")
        cause = "tokenizer.json can't be read"
    else:
        arguments += ["--set", "device=cuda"]
        cause = "needs 1 GPU"
    launch = Started(arguments, folder)
    assert launch.wait_end() == 1
    *before, last = launch.lines
    assert last.startswith("error: ") and cause in last, launch.lines
    assert "Error" not in last and len(launch.lines) <= 10
    assert f"full log: {launch.logs}" in before[-1]
    assert cause in launch.log, "and it is kept"
    assert launch.left == []


def test_a_second_ctrl_c_does_not_wait(folder: Path) -> None:
    """A stream that lasts would be given 30 s."""
    with started([MODEL, "--set", "device=simulated"], folder) as launch:
        launch.wait_ready()
        mark = launch_mark(launch.process.pid)
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        body["stream"] = True
        with httpx.stream("POST", f"{launch.url}/v1/completions", json=body, timeout=60) as reply:
            assert next(reply.iter_lines()).startswith("data: ")
            begun = time.monotonic()
            launch.process.send_signal(signal.SIGINT)
            while not any(line.startswith("stopping") for line in launch.lines):
                assert time.monotonic() - begun < 20
                time.sleep(0.05)
            time.sleep(1.0)
            launch.process.send_signal(signal.SIGINT)
            assert launch.wait_end() == 0
            assert time.monotonic() - begun < 25
        assert_nothing_left(launch, mark)


@pytest.mark.full_chaos
@pytest.mark.timeout(3600)
def test_thirty_starts_and_stops_in_a_row(folder: Path) -> None:
    """Ten of them two at a time."""

    def once(number: int) -> tuple[float, float]:
        with started([MODEL, *SMALL], folder / str(number)) as launch:
            ready_s = launch.wait_ready()
            mark = launch_mark(launch.process.pid)
            assert launch.answers()
            begun = time.monotonic()
            assert launch.stop() == 0
            stop_s = time.monotonic() - begun
            assert marked_processes(mark) == []
            assert launch.left == []
        print(
            f"start {number}: ready after {ready_s:.1f} s, stopped after {stop_s:.1f} s", flush=True
        )
        return ready_s, stop_s

    alone = [once(number) for number in range(20)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = list(pool.map(once, range(20, 30)))
    for name, times in (("alone", alone), ("two at a time", together)):
        ready, stop = zip(*times, strict=True)
        print(f"{name}: ready {min(ready):.1f} to {max(ready):.1f} s, stop up to {max(stop):.1f} s")
