"""Two ingresses over two engine replicas: what one is asked to do reaches all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.servers import ManagedServer
from tests.support.http_server import manta
from tests.support.processes import actor_pids, launch_mark

COUNT = 12
STEP_MS = 20.0
TOKENS = 1500
"""Half a minute of steps: what is not aborted would still run at the end of a test."""


@pytest.fixture(scope="module")
def server() -> Iterator[ManagedServer]:
    with manta(
        num_replicas=2,
        ingress_replicas=2,
        max_total_tokens=65536,
        device="simulated",
        simulated={"step_ms": STEP_MS},
    ) as running:
        wait_until_both_work(running.base_url)
        yield running


@pytest.fixture(scope="module")
def url(server: ManagedServer) -> str:
    return server.base_url


def states(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/server_info", timeout=30).json()[
        "internal_states"
    ]
    return found


def until(url: str, condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition(found := states(url)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def wait_until_both_work(url: str) -> None:
    """Each ingress learns of each replica within seconds of its start."""
    deadline = time.monotonic() + 30
    at = 0
    while len(found := states(url)) < 2 or min(state["steps_total"] for state in found) == 0:
        assert time.monotonic() < deadline, found
        at += 1
        body = {"input_ids": [[at, i, 7, 8] for i in range(8)], "sampling_params": sampling(2)}
        assert httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 200


def sampling(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


def prompt(at: int) -> list[int]:
    return [(at * 37 + i) % 4000 + 6 for i in range(64)]


async def long_streams(url: str, then: Any) -> list[dict[str, Any]]:
    """The last events of `COUNT` streams; `then` runs in a thread once all of them run."""

    async def one(session: aiohttp.ClientSession, at: int) -> dict[str, Any]:
        params = sampling(TOKENS)
        body = {"input_ids": prompt(at), "rid": f"r{at}", "stream": True, "sampling_params": params}
        last: dict[str, Any] = {}
        async with session.post(f"{url}/generate", json=body) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
        return last

    timeout = aiohttp.ClientTimeout(total=60)
    # A connection for each, so that the proxy spreads them.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        calls = [asyncio.create_task(one(session, at)) for at in range(COUNT)]
        try:
            await asyncio.to_thread(then)
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()


def in_flight(url: str) -> list[float]:
    """Requests that each ingress holds, as one scrape sees it."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    head = 'manta_requests_in_flight{endpoint="generate",'
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(head)]


def test_aborts_reach_every_ingress_and_engine(url: str) -> None:
    def act() -> None:
        until(url, lambda found: sum(state["num_running"] for state in found) == COUNT)
        assert min(state["num_running"] for state in states(url)) > 0, "one replica has all"
        held = in_flight(url)
        assert len(held) == 2 and max(held) < COUNT == sum(held), held
        busy = httpx.post(f"{url}/flush_cache", timeout=30)
        assert busy.status_code == 400 and "requests run or wait" in busy.json()["error"]["message"]
        for at in range(0, COUNT, 2):
            reply = httpx.post(f"{url}/abort_request", json={"rid": f"r{at}"}, timeout=30)
            assert reply.status_code == 200
        until(url, lambda found: sum(state["num_running"] for state in found) == COUNT // 2)
        time.sleep(1.0)  # the others go on
        reply = httpx.post(f"{url}/abort_request", json={"abort_all": True}, timeout=30)
        assert reply.status_code == 200
        until(url, lambda found: sum(state["num_running"] for state in found) == 0)

    ends = asyncio.run(long_streams(url, act))
    assert [end["meta_info"]["finish_reason"]["type"] for end in ends] == ["abort"] * COUNT
    lengths = [end["meta_info"]["completion_tokens"] for end in ends]
    assert all(0 < length < TOKENS for length in lengths)
    assert max(lengths[0::2]) < min(lengths[1::2])


def test_one_scrape_has_every_ingress_once(url: str) -> None:
    def requests(text: str) -> list[float]:
        parts = ("manta_requests_total{", 'endpoint="generate"', 'status="200"')
        lines = [line for line in text.splitlines() if all(part in line for part in parts)]
        return [float(line.rpartition(" ")[2]) for line in lines]

    def scrape() -> str:
        time.sleep(0.6)  # what others said is used again for half a second
        return httpx.get(f"{url}/metrics", timeout=30).text

    before = sum(requests(scrape()))
    body = {"input_ids": prompt(5), "sampling_params": sampling(2)}
    for _ in range(8):
        assert httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 200
    for _ in range(4):  # whichever answers
        text = scrape()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        names = [line.rpartition(" ")[0] for line in lines]
        assert len(set(names)) == len(names)
        assert len(requests(text)) == 2 and sum(requests(text)) == before + 8
        up = [line for line in lines if line.startswith("manta_ingress_up{")]
        assert [line.rpartition(" ")[2] for line in up] == ["1.0", "1.0"]
        engines = [line for line in lines if line.startswith("manta_engine_num_running{")]
        assert len(engines) == 2


def test_a_flush_empties_every_cache(url: str) -> None:
    body = {"input_ids": [prompt(at) for at in range(COUNT)], "sampling_params": sampling(2)}
    first = httpx.post(f"{url}/generate", json=body, timeout=30).json()
    assert min(state["kv_cached_tokens"] for state in states(url)) > 0
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{url}/flush_cache", timeout=30).status_code == 200
        # Statistics are a tenth of a second old at most, and those of an idle engine a second.
        until(url, lambda found: all(state["kv_cached_tokens"] == 0 for state in found))
    again = httpx.post(f"{url}/generate", json=body, timeout=30).json()
    assert [item["output_ids"] for item in again] == [item["output_ids"] for item in first]
    assert [item["meta_info"]["cached_tokens"] for item in again] == [0] * COUNT


def test_health_generate_asks_every_engine(server: ManagedServer, url: str) -> None:
    before = {state["replica"]: state["steps_total"] for state in states(url)}
    assert httpx.get(f"{url}/health_generate", timeout=30).status_code == 200
    until(url, lambda found: all(s["steps_total"] > before[s["replica"]] for s in found))
    worker = actor_pids(launch_mark(server.pid), "WorkerActor")[0]
    os.kill(worker, signal.SIGSTOP)
    try:
        time.sleep(2.5)  # by then its silence is noticed
        reply = httpx.get(f"{url}/health_generate", timeout=30)
        assert reply.status_code == 503 and reply.json()["error"]["message"]
    finally:
        os.kill(worker, signal.SIGCONT)
