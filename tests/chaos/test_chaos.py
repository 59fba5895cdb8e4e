"""Whatever is killed, stopped, scaled or updated: no request fails, and every stream is the one
that it would have been undisturbed.

`make test-extended` runs a short form; `make chaos` all of it, three rounds, with a table of times.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.chaos_load import Load, make_cases
from tests.support.cluster import ROLES, Cluster, Struck
from tests.support.families import FAMILIES, make_family
from tests.support.http_server import manta_leaving_nothing, metric, streams, wait_idle
from tests.support.metrics_text import bare
from tests.support.processes import actor_pids, resident_mib, socket_count

CONFIGS = {1: "configs/llama.yaml", 2: "configs/llama-dp2.yaml"}
OUTPUT = 160
STRENGTH_S = 30.0
PATIENT_S = 90.0
"""Instead of STRENGTH_S where other tests may run beside this one."""


@contextmanager
def cluster(num_replicas: int, **args: Any) -> Iterator[Cluster]:
    """A server; once it is stopped nothing of it may be left."""
    args = {"dtype": "float32", "max_total_tokens": 32768, **args}
    config = CONFIGS[num_replicas]
    with manta_leaving_nothing(config, **args) as server:
        yield Cluster(server, config, num_replicas, **args)


async def under_load(
    running: Cluster,
    num_streams: int,
    work: Callable[[Load], Any],
    output: int = OUTPUT,
    stagger_s: float = 0.0,
    num_cases: int | None = None,
) -> Load:
    """Do `work` while streams of `output` tokens run; none of them may notice."""
    cases = await asyncio.to_thread(make_cases, running.url, num_cases or num_streams, output)
    load = Load(running.url, cases, num_streams, stagger_s)
    streaming = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(2.0 + stagger_s)
        await work(load)
    finally:
        load.stop.set()
        async with asyncio.timeout(180):
            await streaming
    assert load.failures == []
    wait_idle(running.url, 5.0)
    return load


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
    print("resumed:", dict(resumed(running.url)))
    print("sockets of the ingress:", sockets, {pid: socket_count(pid) for pid in sockets})


def survivors(running: Cluster) -> list[int]:
    """Processes that nobody strikes."""
    return actor_pids(running.mark, "ServeReplica:llm:ingress")


def resumed(url: str) -> Counter[str]:
    """How often sequences were resumed, by cause."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(r'^manta_requests_resumed_total{cause="(\w+)"} (\S+)$', bare(text), re.M)
    total: Counter[str] = Counter()
    for cause, count in found:
        total[cause] += int(float(count))
    return total


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
@pytest.mark.timeout(600)
def test_scaling_hands_streams_over() -> None:
    """2 -> 1 -> 2 replicas. Streams are longer than the time to drain, and at any point of their
    way when it begins."""

    async def work(load: Load) -> None:
        for num_replicas in (1, 2):
            await asyncio.to_thread(running.deploy, num_replicas)
            await asyncio.sleep(3.0)
            await running.wait_complete(PATIENT_S)

    with cluster(2, drain_timeout_s=1, max_total_tokens=81920) as running:
        load = asyncio.run(under_load(running, 32, work, output=2000, stagger_s=8.0, num_cases=4))
        print(f"\nscaling: {len(load.finished)} streams, resumed: {dict(resumed(running.url))}")
        assert resumed(running.url)["drain"] > 0


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
def test_autoscaling_follows_the_queue() -> None:
    """1 -> 2 replicas while prompts wait, and back when none do; no request fails."""
    autoscaling = dict(
        min_replicas=1,
        max_replicas=2,
        target_ongoing_requests=1000,
        target_queued_tokens=16,
        upscale_delay_s=1,
        downscale_delay_s=5,
    )

    async def work(load: Load) -> None:
        running.num_replicas = 2
        await running.wait_complete(PATIENT_S)

    with cluster(1, autoscaling=autoscaling, max_running_requests=2) as running:
        load = asyncio.run(under_load(running, 12, work))
        running.num_replicas = 1
        asyncio.run(running.wait_complete(PATIENT_S))
        print(f"\nautoscaling: {len(load.finished)} streams")


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
def test_rolling_update() -> None:
    """A new version of everything, the ingress included, whose streams end while it drains."""

    async def work(load: Load) -> None:
        await asyncio.to_thread(running.deploy, max_running_requests=64)
        await asyncio.sleep(3.0)
        await running.wait_complete(180)

    with cluster(2) as running:
        load = asyncio.run(under_load(running, 32, work))
        print(f"\nrolling update: {len(load.finished)} streams")


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
def test_500_clients_cut_mid_stream() -> None:
    rng = random.Random(5)
    bodies = [
        dict(prompt=[rng.randrange(6, 4096) for _ in range(8)], max_tokens=240, ignore_eos=True)
        for _ in range(500)
    ]
    # Room for all at once: none may have to wait until others have ended.
    with cluster(1, max_running_requests=512, max_total_tokens=500 * 288) as running:
        last = asyncio.run(cut_mid_stream(running.url, bodies))
        wait_idle(running.url, 2.0)
        print(f"\n500 clients cut: idle and free {time.monotonic() - last:.2f} s after the last")


async def cut_mid_stream(url: str, bodies: list[dict[str, Any]]) -> float:
    """Stream all bodies until each has had a chunk, then cut every connection; when that was."""
    began = asyncio.Semaphore(0)
    cut = asyncio.Event()

    async def client(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        payload = {**body, "stream": True}
        async with session.post(f"{url}/v1/completions", json=payload) as reply:
            assert reply.status == 200
            await reply.content.readany()
            began.release()
            while not cut.is_set():
                assert await reply.content.readany(), "a stream ended before the cut"
            reply.close()

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        clients = [asyncio.ensure_future(client(session, body)) for body in bodies]
        all_begun = asyncio.gather(*(began.acquire() for _ in bodies))
        await asyncio.wait([all_begun, *clients], return_when=asyncio.FIRST_COMPLETED)
        cut.set()
        await asyncio.gather(*clients)
    return time.monotonic()


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
def test_client_that_stops_reading_for_60_s() -> None:
    """It costs what its output costs, and nobody else's streams slow down."""

    async def work(load: Load) -> None:
        pids = survivors(running)
        body = dict(prompt="x", max_tokens=3500, ignore_eos=True, stream=True, logprobs=5)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1024) as session:
            url = f"{running.url}/v1/completions"
            async with session.post(url, json=body) as quick:
                assert quick.status == 200
                since = time.monotonic()
                async for _ in quick.content.iter_any():
                    if time.monotonic() - since > 20.0:
                        break
            beside_quick = load.median_gap_s(since)
            before = sum(map(resident_mib, pids))
            async with session.post(url, json=body) as slow:
                assert slow.status == 200
                since = time.monotonic()
                await asyncio.sleep(60.0)
                beside_slow = load.median_gap_s(since)
                grown = sum(map(resident_mib, pids)) - before
        print(f"\nslow client: ingress {grown:+.1f} MiB of {before:.0f}; median gap of the others")
        print(f"{beside_slow * 1e3:.1f} ms beside it, {beside_quick * 1e3:.1f} if it reads")
        assert grown < 64
        assert beside_slow < 2 * beside_quick

    with cluster(1) as running:
        asyncio.run(under_load(running, 8, work))


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
def test_requests_of_a_lost_ingress_end() -> None:
    """Its clients are cut off, so nobody reads what the engine would go on to generate."""

    async def work() -> None:
        body = dict(prompt="x", max_tokens=3500, ignore_eos=True)
        reading = asyncio.ensure_future(streams(running.url, [body] * 8))
        await asyncio.sleep(3.0)
        assert metric(running.url, "manta_engine_num_running") == 8
        os.kill(survivors(running)[0], signal.SIGKILL)
        await asyncio.wait([reading])
        assert reading.exception() is not None or any(not got.done for got in reading.result())
        await running.wait_complete(PATIENT_S)

    with cluster(1, hang_timeout_s=4) as running:
        asyncio.run(work())
        wait_idle(running.url, 5.0)


def kill_workers_of(folder: Path) -> None:
    """The worker of each replica in turn: one of them may have no stream when it is struck, as the
    streams begin and end; then the other has all."""

    async def work(load: Load) -> None:
        for pid in running.pids("worker"):
            await running.strike("worker", "kill", PATIENT_S, pid)

    with cluster(2, model=str(folder)) as running:
        load = asyncio.run(under_load(running, 4, work, output=120))
        assert running.is_complete(), running.counts()
        print(f"\n{len(load.finished)} streams, resumed: {dict(resumed(running.url))}")
        assert sum(resumed(running.url).values()) > 0


@pytest.mark.timeout(600)
def test_a_mixture_of_experts(tmp_path: Path) -> None:
    kill_workers_of(make_family(tmp_path, "qwen3_moe"))


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family(tmp_path: Path, name: str) -> None:
    """Models that transformers' code computes."""
    kill_workers_of(make_family(tmp_path, name))
