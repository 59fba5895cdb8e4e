"""More starts and stops of `manta serve`: ports that are taken, failures, under load, impatient,
and thirty in a row."""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import REPO_ROOT
from deploy.start import ports
from deploy.start.processes import marked_processes
from tests.support.http_server import metric
from tests.support.launches import MODEL, SMALL, Started, assert_nothing_left, started
from tests.support.leaving import Client, Way
from tests.support.processes import launch_mark


def test_every_port_of_first_choice_is_taken(tmp_path: Path) -> None:
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
        with started([MODEL, *SMALL], tmp_path) as launch:
            launch.wait_ready()
            assert launch.answers()
            assert launch.stop() == 0


def test_a_device_that_is_not_there_is_refused_before_ray_starts(tmp_path: Path) -> None:
    launch = Started([MODEL, *SMALL, "--set", "device=cuda"], tmp_path)
    assert launch.wait_end() == 2
    assert "error: " in launch.lines[-1] and "needs 1 GPU" in launch.lines[-1], launch.lines
    assert launch.left == []


def test_a_start_that_fails_ends_with_its_cause(tmp_path: Path) -> None:
    model = Path(shutil.copytree(REPO_ROOT / MODEL, tmp_path / "model"))
    arguments = [str(model), *SMALL]
    (model / "tokenizer.json").write_text("{}")
    cause = "tokenizer.json can't be read"
    launch = Started(arguments, tmp_path)
    assert launch.wait_end() == 1
    *before, last = launch.lines
    assert last.startswith("error: ") and cause in last, launch.lines
    assert "Error" not in last and len(launch.lines) <= 10
    assert f"full log: {launch.logs}" in before[-1]
    assert cause in launch.log, "and it is kept"
    assert launch.left == []


def test_a_stop_under_load_leaves_no_traceback(tmp_path: Path) -> None:
    """Twenty clients wait for their answers when Ctrl-C comes."""
    settings = ["device=simulated", "drain_timeout_s=1", "max_total_tokens=1000000"]
    options = [word for setting in settings for word in ("--set", setting)]
    with started([MODEL, *options], tmp_path) as launch:
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


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    """A stream that lasts would be given 30 s."""
    with started([MODEL, "--set", "device=simulated"], tmp_path) as launch:
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
def test_thirty_starts_and_stops_in_a_row(tmp_path: Path) -> None:
    """Ten of them two at a time."""

    def once(number: int) -> tuple[float, float]:
        with started([MODEL, *SMALL], tmp_path / str(number)) as launch:
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
