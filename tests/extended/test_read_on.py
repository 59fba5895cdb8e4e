"""Streams of all APIs whose connections are lost with their ingress, and a server that is lost
whole: clients that come back have what they would have had."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.servers import ManagedServer
from tests.support.http_server import manta, metric, wait_idle
from tests.support.launches import MODEL, SMALL, started
from tests.support.processes import actor_pids, launch_mark
from tests.support.reading_on import (
    MAX_OPENING,
    NOT_KEPT,
    NOT_TAKEN,
    Read,
    difference,
    read_through,
)
from tests.support.redis_server import RedisServer, redis_server

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "s": {"type": "string"}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Say it"}]
TOKENS = 250
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "def ", "max_tokens": TOKENS, "ignore_eos": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": TOKENS, "logprobs": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [FUNCTION],
            "tool_choice": "required",
            "max_tokens": 200,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": 2, "max_tokens": TOKENS, "logprobs": True, "top_logprobs": 2},
    ),
    ("/v1/responses", {"input": "Say it", "max_output_tokens": TOKENS, "ignore_eos": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": TOKENS}),
    ("/generate", {"text": "def ", "sampling_params": {"max_new_tokens": TOKENS}}),
]


def request(number: int) -> tuple[str, dict[str, Any]]:
    path, body = SHAPES[number % len(SHAPES)]
    if path == "/generate":
        seeded = {"sampling_seed": number, "temperature": 0.8, "ignore_eos": True}
        return path, {**body, "sampling_params": {**body["sampling_params"], **seeded}}
    if path == "/v1/messages":
        return path, {**body, "temperature": 0.0, "system": f"You are number {number}."}
    return path, {**body, "seed": number, "temperature": 0.8}


async def read_all(url: str, reads: list[Read]) -> None:
    """Each of them reads the request of its number."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    opening = asyncio.Semaphore(MAX_OPENING)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(
            *(
                read_through(read, session, url, *request(number), opening)
                for number, read in enumerate(reads)
            )
        )


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def server(redis: RedisServer) -> Iterator[ManagedServer]:
    options = {"ingress_replicas": 2, "num_replicas": 2, "max_total_tokens": 32768}
    store = {"request_store": "redis", "request_store_url": redis.url}
    with manta(dtype="float32", **options, **store) as running:
        yield running
    assert not running.killed, "the server had to be killed to stop"


async def _disturb(
    server: ManagedServer, redis: RedisServer, reads: list[Read], kills: int
) -> None:
    """An ingress is killed as soon as each has an event; then workers, the store and ingresses in
    turn, each once those before are back."""
    mark, rng = launch_mark(server.pid), random.Random(1)
    reading = asyncio.ensure_future(read_all(server.base_url, reads))
    while not all(read.events for read in reads):
        assert not reading.done(), reading.result()
        await asyncio.sleep(0.01)
    for number in range(kills):
        if number:
            await asyncio.sleep(1.5)
        if number % 3 == 2:
            redis.kill()
            await asyncio.sleep(0.5)
            await asyncio.to_thread(redis.start)
            continue
        role = ("ServeReplica:llm:ingress", "WorkerActor")[number % 3]
        async with asyncio.timeout(90):
            while len(pids := actor_pids(mark, role)) < 2:
                await asyncio.sleep(0.1)
        if reading.done():
            break
        os.kill(rng.choice(pids), signal.SIGKILL)
    await reading


def test_streams_outlive_their_ingress(server: ManagedServer, redis: RedisServer) -> None:
    _check(server, redis, 3 * len(SHAPES), 4)


@pytest.mark.full_chaos
@pytest.mark.timeout(1200)
def test_500_streams(server: ManagedServer, redis: RedisServer) -> None:
    _check(server, redis, 500, 20)


def _check(server: ManagedServer, redis: RedisServer, count: int, kills: int) -> None:
    undisturbed, disturbed = ([Read() for _ in range(count)] for _ in range(2))
    asyncio.run(read_all(server.base_url, undisturbed))
    # On a busy machine some may have to begin again; none is cut.
    assert {loss for read in undisturbed for loss in read.losses} <= {NOT_TAKEN, NOT_KEPT}
    asyncio.run(_disturb(server, redis, disturbed, kills))
    assert any(read.losses for read in disturbed), "nobody lost anything"
    for number, (read, want) in enumerate(zip(disturbed, undisturbed, strict=True)):
        ids = [event.split("\n")[0] for event in read.events]
        assert len(set(ids)) == len(ids), "an event came twice"
        path, _ = request(number)
        if path == "/generate":  # each event holds those before it
            assert read.contents()[0][-2:] == want.contents()[0][-2:]
        else:
            assert not difference(read, want), (number, path, read.losses)
    deadline = time.monotonic() + 90
    while len(actor_pids(launch_mark(server.pid), "ServeReplica:llm:ingress")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    wait_idle(server.base_url, 60)
    assert metric(server.base_url, "manta_requests_in_flight") == 0


def test_responses_outlive_the_whole_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_STATE_DIR", str(tmp_path / "state"))
    bodies = [
        {"input": f"Say {n}", "seed": n, "max_output_tokens": 400, "ignore_eos": True}
        for n in range(6)
    ]

    def text(response: dict[str, Any]) -> str:
        said: str = response["output"][0]["content"][0]["text"]
        return said

    with started([MODEL, *SMALL], tmp_path / "first") as launch:
        launch.wait_ready()
        at = f"{launch.url}/v1/responses"
        with httpx.Client(timeout=60) as http, ThreadPoolExecutor(len(bodies)) as pool:
            replies = pool.map(lambda body: http.post(at, json=body).json(), bodies)
            want = [text(reply) for reply in replies]
            made = [http.post(at, json={**body, "background": True}).json() for body in bodies]
        launch.process.kill()
    with started([MODEL, *SMALL], tmp_path / "second") as launch:
        launch.wait_ready()
        at, deadline = f"{launch.url}/v1/responses", time.monotonic() + 120
        had_ended = 0
        for one, said in zip(made, want, strict=True):
            while True:
                found = httpx.get(f"{at}/{one['id']}", timeout=30).json()
                if found["status"] not in ("queued", "in_progress"):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.1)
            had_ended += found["status"] == "incomplete"
            assert text(found) == said
        assert had_ended == len(made)
        assert launch.stop() == 0
