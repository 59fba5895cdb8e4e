"""Whatever is killed, stopped, scaled or updated: no request fails, and every stream is the one
that it would have been undisturbed.

`make test` runs a short form; `make chaos` all of it, three rounds, with its times as a table.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deploy.launch import marked_processes
from tests.chaos.cluster import ROLES, Cluster, Struck
from tests.chaos.load import Load, make_cases
from tests.integration.http_server import manta, metric
from tests.processes import actor_pids, socket_count

CONFIGS = {1: "configs/llama.yaml", 2: "configs/llama-dp2.yaml"}
OUTPUT = 160
STRENGTH_S = 30.0
PATIENT_S = 90.0
"""Instead of STRENGTH_S where other tests may run beside this one."""


@contextmanager
def cluster(num_replicas: int, **args: Any) -> Iterator[Cluster]:
    """A server; once it is stopped nothing of it may be left."""
    args = {"dtype": "float32", "max_total_tokens": 32768, **args}
    shared = set(os.listdir("/dev/shm"))
    config = CONFIGS[num_replicas]
    with manta(config, **args) as server:
        running = Cluster(server, config, num_replicas, **args)
        yield running
    assert not server.killed, "the server had to be killed to stop"
    assert marked_processes(running.mark) == [], "processes left behind"
    assert set(os.listdir("/dev/shm")) <= shared, "shared memory left behind"


async def under_load(running: Cluster, num_streams: int, work: Any) -> Load:
    """Do `work` (a function of the load) while streams run; none of them may notice."""
    cases = await asyncio.to_thread(make_cases, running.url, num_streams, OUTPUT)
    load = Load(running.url, cases, num_streams)
    streaming = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(2.0)
        await work(load)
    finally:
        load.stop.set()
        await asyncio.wait_for(streaming, 180)
    assert load.failures == []
    await_idle(running.url)
    return load


def await_idle(url: str, limit_s: float = 5.0) -> None:
    """All requests have let go of their memory."""
    names = ("num_running", "num_waiting", "kv_used_tokens")
    deadline = time.monotonic() + limit_s
    while held := {n: v for n in names if (v := metric(url, f"manta_engine_{n}"))}:
        assert time.monotonic() < deadline, held
        time.sleep(0.05)
    assert metric(url, "manta_engine_kv_leaks_total") == 0


async def strikes(
    running: Cluster, num_streams: int, blows: list[tuple[str, str]], limit_s: float
) -> None:
    """Strike blow by blow, at full strength each time."""
    rng = random.Random(3)
    struck: list[Struck] = []
    sockets = {pid: socket_count(pid) for pid in survivors(running)}

    async def work(load: Load) -> None:
        for role, how in blows:
            struck.append(await running.strike(role, how, limit_s))
            await asyncio.sleep(rng.uniform(0.5, 2.0))

    load = await under_load(running, num_streams, work)
    assert running.is_complete(), running.counts()
    print(
        f"\n{len(load.finished)} streams, {load.num_tokens} tokens, {running.num_replicas} replicas"
    )
    print(f"{'':>18} /health 503  well again  streams held up  longest")
    for blow, until in itertools.pairwise([*struck, None]):
        assert blow is not None
        stalls = load.stalls(blow.at, until.at if until else blow.at + limit_s)
        ill = "    never" if blow.ill_s is None else f"{blow.ill_s:7.2f} s"
        longest = f"{stalls[0]:7.2f} s" if stalls else ""
        print(
            f"{blow.how:>6} {blow.role:>10} {ill:>12} {blow.strong_s:9.1f} s"
            f" {len(stalls):>15} {longest}"
        )
    print("resumed:", metric_by_label(running.url, "manta_requests_resumed_total"))
    print("sockets of the ingress:", sockets, {pid: socket_count(pid) for pid in sockets})


def survivors(running: Cluster) -> list[int]:
    """Processes that nobody strikes."""
    return actor_pids(running.mark, "ServeReplica:llm:ingress")


def metric_by_label(url: str, name: str) -> str:
    import httpx

    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return ", ".join(line.partition("{")[2] for line in lines if line.startswith(name + "{"))


ALL = [(role, how) for how in ("kill", "hang") for role in ROLES]


@pytest.mark.timeout(280)
def test_short(request: pytest.FixtureRequest) -> None:
    """One replica: every role killed, one stopped."""
    if request.config.getoption("--full-chaos"):
        pytest.skip("the full form covers it")
    blows = [(role, "kill") for role in ROLES] + [("worker", "hang")]
    with cluster(1, hang_timeout_s=4) as running:
        asyncio.run(strikes(running, 8, blows, PATIENT_S))


@pytest.mark.full_chaos
@pytest.mark.timeout(1800)
def test_two_replicas_three_rounds() -> None:
    with cluster(2) as running:
        asyncio.run(strikes(running, 32, ALL * 3, STRENGTH_S))


@pytest.mark.full_chaos
@pytest.mark.timeout(900)
def test_one_replica() -> None:
    with cluster(1) as running:
        asyncio.run(strikes(running, 32, ALL, STRENGTH_S))


@pytest.mark.full_chaos
@pytest.mark.timeout(900)
def test_scaling_and_rolling_update() -> None:
    async def work(load: Load) -> None:
        for num_replicas in (1, 2):
            await asyncio.to_thread(running.deploy, num_replicas)
            await asyncio.sleep(3.0)
            await running.wait_complete(PATIENT_S)
        await asyncio.to_thread(running.deploy, max_running_requests=64)
        await asyncio.sleep(3.0)
        await running.wait_complete(180)

    with cluster(2) as running:
        load = asyncio.run(under_load(running, 32, work))
        print(f"\n{len(load.finished)} streams over scaling and update")
