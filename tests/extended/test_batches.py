"""Batches whose processes are killed, a server that is lost whole, and files that are too large."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.servers import ManagedServer
from tests.support.http_server import manta, metric, wait_idle
from tests.support.launches import MODEL, SMALL, started
from tests.support.processes import actor_pids, launch_mark
from tests.support.redis_server import RedisServer, redis_server

CHAT = "/v1/chat/completions"
ROLES = ("ServeReplica:llm:ingress", "WorkerActor", "TokenizerActor")
"""Whose processes are killed, and Redis; there are two of each."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}


def line(number: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Say number {number % 50}"}],
        "max_tokens": 60 + number % 60,
        "temperature": 0.9,
        "ignore_eos": True,
    }
    if number % 7 == 1:
        body |= {"n": 2, "logprobs": True}
    if number % 7 == 2:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA},
        }
        body["ignore_eos"] = False
    if number % 97 == 3:
        body["max_tokens"] = -1  # it fails
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def lines(count: int) -> bytes:
    return b"".join(json.dumps(line(number)).encode() + b"\n" for number in range(count))


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=50, timeout=60)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def server(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    options = {"ingress_replicas": 2, "num_replicas": 2, "max_total_tokens": 32768}
    store = {
        "request_store": "redis",
        "request_store_url": redis.url,
        "file_store": str(tmp_path_factory.mktemp("files")),
        "max_file_bytes": 64 << 20,
    }
    with manta(dtype="float32", **options, **store) as running:
        yield running
    assert not running.killed, "the server had to be killed to stop"


Kill = Callable[[int], bool]
"""Gets the number of a kill; returns whether it happened, or else has to wait for something."""


def run(client: openai.OpenAI, file_id: str, kill: Kill | None = None) -> tuple[bytes, bytes, int]:
    """A batch of the file. `kill` is called while it runs, each time when lines have been answered
    since the kill before. Its files, and the number of kills."""
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    kills, answered_before = 0, -1
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None
        answered = counts.completed + counts.failed
        running = batch.status == "in_progress" and answered > answered_before
        if kill is not None and running and kill(kills):
            kills, answered_before = kills + 1, answered
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert counts is not None and counts.completed + counts.failed == counts.total
    assert batch.output_file_id and batch.error_file_id
    made, wrong = [
        client.files.content(name).read() for name in (batch.output_file_id, batch.error_file_id)
    ]
    return made, wrong, kills


def _check(server: ManagedServer, redis: RedisServer, count: int, most_kills: int) -> int:
    client = client_of(server.base_url)
    data = lines(count)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    mark, rng = launch_mark(server.pid), random.Random(1)

    def kill(number: int) -> bool:
        if number == most_kills:
            return False
        if number % 4 == 3:
            redis.kill()
            redis.start()
            return True
        pids = actor_pids(mark, ROLES[number % 4])
        if len(pids) < 2:
            return False  # the one killed before isn't back
        os.kill(rng.choice(pids), signal.SIGKILL)
        return True

    disturbed, errors, kills = run(client, file.id, kill)
    undisturbed, same_errors, _ = run(client, file.id)
    assert disturbed == undisturbed
    assert errors == same_errors
    ids = [json.loads(one)["custom_id"] for one in [*disturbed.splitlines(), *errors.splitlines()]]
    assert sorted(ids) == sorted(f"line-{number}" for number in range(count))
    deadline = time.monotonic() + 90
    while len(actor_pids(mark, "ServeReplica:llm:ingress")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    wait_idle(server.base_url, 60)
    assert metric(server.base_url, "manta_requests_in_flight") == 0
    return kills


def test_lines_outlive_every_process(server: ManagedServer, redis: RedisServer) -> None:
    assert _check(server, redis, 300, 8) >= 1


@pytest.mark.full_chaos
@pytest.mark.timeout(3000)
def test_10_000_lines(server: ManagedServer, redis: RedisServer) -> None:
    assert _check(server, redis, 10_000, 60) >= 8


def test_a_file_that_is_too_large_is_refused_while_it_comes(server: ManagedServer) -> None:
    """2 GB are announced, or come without a word. The answer is there before they are."""
    ingresses = actor_pids(launch_mark(server.pid), "ServeReplica:llm:ingress")
    before = sum(psutil.Process(pid).memory_info().rss for pid in ingresses)
    host, port = server.base_url.removeprefix("http://").split(":")
    head = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    block = b"x" * (1 << 20)
    for length in (b"Content-Length: 2147483648", b"Transfer-Encoding: chunked"):
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(
                b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n"
                + length
                + b"\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n"
            )
            sent = 0
            for piece in (head, *([block] * 2000)):
                if select.select([connection], [], [], 0)[0]:
                    break
                if length.startswith(b"Transfer"):
                    piece = b"%x\r\n%b\r\n" % (len(piece), piece)
                connection.sendall(piece)
                sent += len(piece)
            assert b"413" in connection.recv(65536).split(b"\r\n")[0]
            assert sent < 1000 << 20
    after = sum(psutil.Process(pid).memory_info().rss for pid in ingresses)
    assert after - before < 100 << 20
    assert httpx.get(f"{server.base_url}/v1/files").status_code == 200


def test_a_batch_outlives_the_whole_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTA_STATE_DIR", str(tmp_path / "state"))
    with started([MODEL, *SMALL], tmp_path / "first") as launch:
        launch.wait_ready()
        client = client_of(launch.url)
        file = client.files.create(file=("in.jsonl", lines(150)), purpose="batch")
        want = run(client, file.id)[:2]
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while client.batches.retrieve(batch.id).status == "validating":
            time.sleep(0.1)
        launch.process.kill()
    with started([MODEL, *SMALL], tmp_path / "second") as launch:
        launch.wait_ready()
        client, deadline = client_of(launch.url), time.monotonic() + 180
        found = client.batches.retrieve(batch.id)
        while found.status != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.2)
            found = client.batches.retrieve(batch.id)
        made = [
            client.files.content(name).read()
            for name in (found.output_file_id, found.error_file_id)
            if name
        ]
        assert made == list(want)
        assert launch.stop() == 0
