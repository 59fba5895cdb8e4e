"""Ray's own processes, HAProxy and the launcher are killed; an engine's step hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from deploy.start.processes import is_alive, marked_processes
from tests.support.launches import MODEL, SMALL, Started, started
from tests.support.processes import launch_mark, program_pids

LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def health(launch: Started) -> tuple[int, str]:
    """Status (0: nothing listens) and text of `/health`."""
    try:
        reply = httpx.get(f"{launch.url}/health", timeout=10)
    except httpx.TransportError:
        return 0, ""
    return reply.status_code, reply.text


@pytest.mark.parametrize(
    "program", ["raylet", pytest.param("gcs_server", marks=pytest.mark.full_chaos)]
)
def test_the_launcher_ends_with_the_cause_when_ray_is_lost(tmp_path: Path, program: str) -> None:
    with started([MODEL, *SMALL], tmp_path) as launch:
        launch.wait_ready()
        mark = launch_mark(launch.process.pid)
        (pid,) = program_pids(mark, program)
        os.kill(pid, signal.SIGKILL)
        assert launch.wait_end() == 1
        assert program in launch.lines[-1] and str(pid) in launch.lines[-1], launch.lines
        assert marked_processes(mark) == [] and launch.left == []


def test_haproxy_comes_back(tmp_path: Path) -> None:
    with started([MODEL, *SMALL], tmp_path) as launch:
        launch.wait_ready()
        (pid,) = program_pids(launch_mark(launch.process.pid), "haproxy")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        wait_until(lambda: health(launch)[0] == 200)
        assert launch.answers()
        assert launch.stop() == 0


def test_nothing_is_left_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    with started([MODEL, *SMALL], tmp_path) as launch:
        launch.wait_ready()
        mark = launch_mark(launch.process.pid)
        launch.process.kill()
        wait_until(lambda: marked_processes(mark) == [])
        wait_until(lambda: os.listdir(launch.temporary) == [])


_HANGS = """
import sys, threading, time
from pathlib import Path

def patch():
    while not hasattr(sys.modules.get("engine.worker.simulated"), "SimulatedWorker"):
        time.sleep(0.1)
    worker = sys.modules["engine.worker.simulated"].SimulatedWorker
    forward = worker.forward
    def hang(self, batch):
        while Path({file!r}).exists():
            time.sleep(3600)
        return forward(self, batch)
    worker.forward = hang

threading.Thread(target=patch, daemon=True).start()
"""
"""A step never returns while a file exists; the worker's other threads answer."""


def test_an_engine_whose_step_hangs_is_unhealthy_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that was in the step goes on with the next engine."""
    switch = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(_HANGS.format(file=str(switch)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = [*SMALL, "--set", "device=simulated", "--set", "hang_timeout_s=6"]
    with started([MODEL, *options], tmp_path) as launch:
        launch.wait_ready()
        assert launch.answers()
        switch.touch()
        replies: list[httpx.Response] = []
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True}
        url = f"{launch.url}/v1/completions"
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(url, json=body, timeout=240))
        )
        asking.start()
        began = time.monotonic()
        wait_until(lambda: "hangs in a step" in health(launch)[1])
        print(f"unhealthy after {time.monotonic() - began:.1f} s: {health(launch)}")
        assert health(launch)[0] == 503
        switch.unlink()  # the next engine is a good one
        asking.join()
        assert [reply.status_code for reply in replies] == [200]
        assert replies[0].json()["usage"]["completion_tokens"] == 50
        wait_until(lambda: health(launch)[0] == 200)
        assert launch.stop() == 0
