"""Ray's own processes, HAProxy and the launcher are killed."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
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
