"""Requests go to the engine replica that holds their prefix, through Ray Serve."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.servers import ManagedServer
from tests.support.http_server import manta, settled_metric

PREFIX = 320
PAGE = 16


@pytest.fixture(scope="module")
def server() -> Iterator[ManagedServer]:
    with manta(num_replicas=2, dtype="float32", max_total_tokens=16384) as running:
        wait_until_both_work(running.base_url)
        yield running
    assert not running.killed, "the server had to be killed to stop"


def wait_until_both_work(url: str) -> None:
    """The ingress learns of each replica within seconds of its start."""
    rng = random.Random(0)
    deadline = time.monotonic() + 30
    while min(per_replica(url, "steps_total")) == 0:
        assert time.monotonic() < deadline, "one replica gets no requests"
        asyncio.run(send(url, [body([rng.randrange(6, 4000) for _ in range(300)])] * 4, 4))


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


async def send(url: str, bodies: list[dict[str, Any]], at_once: int) -> list[int]:
    """`cached_tokens` of each, in order."""
    gate = asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(request: dict[str, Any]) -> int:
            async with gate, session.post(f"{url}/v1/completions", json=request) as reply:
                assert reply.status == 200, await reply.text()
                details = (await reply.json())["usage"]["prompt_tokens_details"]
                return int(details["cached_tokens"])

        return list(await asyncio.gather(*(one(request) for request in bodies)))


def test_prefixes_stay_where_they_are_and_load_is_shared(server: ManagedServer) -> None:
    url, rng = server.base_url, random.Random(1)
    prefixes = [[rng.randrange(6, 4000) for _ in range(PREFIX)] for _ in range(12)]
    first = asyncio.run(send(url, [body([*p, 7]) for p in prefixes], 12))
    assert first == [0] * 12
    for turn in range(3):
        tails = [[rng.randrange(6, 4000) for _ in range(20)] for _ in prefixes]
        rounds = [body(p + t) for p, t in zip(prefixes, tails, strict=True)]
        rng.shuffle(rounds)
        cached = asyncio.run(send(url, rounds, 4))
        assert min(cached) >= PREFIX // PAGE * PAGE, (turn, cached)
    # Both replicas hold some of the prefixes: less than all of them each.
    used = per_replica(url, "kv_cached_tokens")
    assert len(used) == 2 and min(used) >= PREFIX, used


def test_hot_prefix_spreads_when_its_replica_is_busy(server: ManagedServer) -> None:
    """Affinity isn't a duty: long queues at one replica send work to the other."""
    url, rng = server.base_url, random.Random(2)
    prefix = [rng.randrange(6, 4000) for _ in range(64)]
    asyncio.run(send(url, [body([*prefix, 7])], 1))
    before = per_replica(url, "prompt_tokens_total")
    bodies = [
        body(prefix + [rng.randrange(6, 4000) for _ in range(200)], max_tokens=100)
        for _ in range(24)
    ]
    asyncio.run(send(url, bodies, 24))
    after = per_replica(url, "prompt_tokens_total")
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert min(grown) >= 6 * 264, grown


def test_other_salts_share_nothing(server: ManagedServer) -> None:
    url, rng = server.base_url, random.Random(3)
    prompt = [rng.randrange(6, 4000) for _ in range(PREFIX)]
    salted = [body(prompt, cache_salt=salt) for salt in ("a", "b", "a", "b")]
    cached = asyncio.run(send(url, salted, 1))
    assert cached == [0, 0, PREFIX - PAGE, PREFIX - PAGE]


def test_health_of_all(server: ManagedServer) -> None:
    assert httpx.get(f"{server.base_url}/health", timeout=30).json() == {"status": "ok"}
    assert settled_metric(server.base_url, "manta_engine_num_running") == 0


def per_replica(url: str, name: str) -> list[float]:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if line.startswith(f"manta_engine_{name}{{")]
    return [float(line.rpartition(" ")[2]) for line in sorted(found)]
