"""The HTTP surface behind each of Serve's proxies: HAProxy, as the launcher starts it, and the
Python proxy of plain `serve run`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.servers import ManagedServer
from deploy.start.processes import marked_processes
from tests.support.http_server import manta, metric, serve_run, stream, streams, wait_idle
from tests.support.processes import SharedMemory, actor_pids, launch_mark

SETTINGS: dict[str, Any] = {
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "max_queued_requests": 4,
    "dtype": "float32",
}
LONG: dict[str, Any] = {"prompt": "def ", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
SMALLEST_BUFFER = 4096
"""Bytes that a proxy gathers, if it does; a client that is held up reads some events at once."""


PROXIES = {"haproxy": lambda: manta(**SETTINGS), "serve run": lambda: serve_run(**SETTINGS)}


@pytest.fixture(scope="module", params=PROXIES)
def server(request: pytest.FixtureRequest) -> Iterator[ManagedServer]:
    with PROXIES[request.param]() as running:
        yield running
    if request.param != "serve run":
        assert not running.killed, "the server had to be killed to stop"


@pytest.fixture(scope="module")
def url(server: ManagedServer) -> str:
    return server.base_url


def test_stream_and_reply_agree(url: str) -> None:
    body = {"prompt": "def ", "max_tokens": 40, "temperature": 0}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]
    (got,) = asyncio.run(streams(url, [body]))
    assert got.done and got.text == whole["text"]
    assert got.finish_reason == whole["finish_reason"]


def test_a_stream_is_not_gathered_into_pieces(url: str) -> None:
    async def reads() -> list[int]:
        sizes = []
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json={**LONG, "stream": True}) as reply,
        ):
            assert reply.headers["content-type"].startswith("text/event-stream")
            async for piece in reply.content.iter_any():
                sizes.append(len(piece))
        return sizes

    sizes = asyncio.run(reads())
    assert sum(sizes) / len(sizes) < SMALLEST_BUFFER


def test_errors_keep_status_body_and_headers(url: str) -> None:
    cases: list[tuple[str, str, Any, int, str | None]] = [
        ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
        ("GET", "/nowhere", None, 404, None),
        ("DELETE", "/v1/completions", None, 405, None),
    ]
    for method, path, body, status, param in cases:
        reply = httpx.request(
            method, f"{url}{path}", json=body, headers={"X-Request-Id": "abc-1"}, timeout=30
        )
        assert reply.status_code == status, reply.text
        assert reply.json()["error"]["param"] == param
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers.get_list("x-request-id") == ["abc-1"]
    reply = httpx.get(f"{url}/v1/models", timeout=30)
    assert len(reply.headers.get_list("x-request-id")) == 1


def test_full_queue_is_429_with_retry_after(url: str) -> None:
    """While 4 run, of 12 more 4 wait and 8 are refused at once; those that got in end well."""

    async def flood() -> list[tuple[int, str, dict[str, Any] | None]]:
        async def one(session: aiohttp.ClientSession) -> tuple[int, str, dict[str, Any] | None]:
            async with session.post(f"{url}/v1/completions", json=LONG) as reply:
                retry = reply.headers.get("Retry-After", "")
                return reply.status, retry, (await reply.json()).get("error")

        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            running = [asyncio.create_task(one(session)) for _ in range(4)]
            while await asyncio.to_thread(metric, url, "manta_engine_num_running") < 4:
                assert not any(task.done() for task in running)
            return list(await asyncio.gather(*running, *(one(session) for _ in range(12))))

    replies = asyncio.run(flood())
    refused = [r for r in replies if r[0] == 429]
    assert [r[0] for r in replies].count(200) == 16 - len(refused)
    assert len(refused) == 8, replies
    for _, retry_after, error in refused:
        assert retry_after == "1"
        assert error is not None and error["type"] == "rate_limit_error"
    wait_idle(url, 5)


def test_cut_clients_free_their_requests(url: str) -> None:
    """Those that stream, and those that wait for a reply in one piece."""

    async def cut() -> None:
        await asyncio.gather(*(streams(url, [{**LONG, "max_tokens": 3000}], 3) for _ in range(4)))
        async with aiohttp.ClientSession() as session:
            tasks = [
                asyncio.ensure_future(
                    session.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 3000})
                )
                for _ in range(4)
            ]
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cut())
    wait_idle(url, 2)


def test_serves_own_time_limit_frees_the_request(url: str, request: pytest.FixtureRequest) -> None:
    """`request_timeout_s` of the config. In Serve this header is the same limit for one request;
    the launcher's servers don't take it from clients."""
    takes_header = request.node.callspec.params["server"] == "serve run"
    headers = {"X-Request-Timeout-Seconds": "1" if takes_header else "0.01"}
    body = {**LONG, "max_tokens": 3500 if takes_header else 100}
    started = time.monotonic()
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == (408 if takes_header else 200), reply.text
    assert not takes_header or time.monotonic() - started < 10
    wait_idle(url, 2)


def test_health_and_metrics(url: str) -> None:
    assert httpx.get(f"{url}/health", timeout=30).json() == {"status": "ok"}
    assert metric(url, "manta_requests_total") > 0


# --- HAProxy alone


@pytest.mark.full_chaos
def test_two_haproxy_servers_side_by_side_and_clean_stops() -> None:
    shared = SharedMemory()
    with manta(**SETTINGS) as one, manta(ingress_replicas=2, **SETTINGS) as two:
        marks = [launch_mark(server.pid) for server in (one, two)]
        folders = [haproxy_folder(mark) for mark in marks]
        assert folders[0] != folders[1]
        for server, mark in zip((one, two), marks, strict=True):
            body = {"prompt": "x", "max_tokens": 2}
            assert httpx.post(f"{server.base_url}/v1/completions", json=body).status_code == 200
            assert served_to_the_network(mark) == []
        asyncio.run(kill_one_ingress_of(two, marks[1]))
        assert httpx.get(f"{one.base_url}/health", timeout=30).status_code == 200
        ports = [server.port for server in (one, two)]
    for server, mark, folder, port in zip((one, two), marks, folders, ports, strict=True):
        assert not server.killed, "the server had to be killed to stop"
        assert marked_processes(mark) == [], "processes left behind"
        assert not folder.exists()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not (left := shared.left()), f"shared memory left behind: {left}"


async def kill_one_ingress_of(server: ManagedServer, mark: str) -> None:
    """HAProxy's configuration is reloaded: streams of the other ingress go on, the rest is cut
    without [DONE], and new requests are served."""
    url = server.base_url
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        begun = asyncio.Semaphore(0)
        streamed = (stream(session, url, LONG, on_begun=begun.release) for _ in range(4))
        tasks = [asyncio.ensure_future(one) for one in streamed]
        async with asyncio.timeout(60):
            for _ in tasks:
                await begun.acquire()
        ingresses = actor_pids(mark, "ServeReplica:llm:ingress")
        assert len(ingresses) == 2
        os.kill(ingresses[0], signal.SIGKILL)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    whole = [e for e in ended if not isinstance(e, BaseException) and e.done]
    cut = [e for e in ended if isinstance(e, aiohttp.ClientError)]
    assert len(whole) == len(cut) == 2, ended
    assert len({tuple(e.token_ids) for e in whole}) == 1
    deadline = time.monotonic() + 60
    while len(actor_pids(mark, "ServeReplica:llm:ingress")) < 2:
        assert time.monotonic() < deadline
        for reply in await asyncio.to_thread(some_replies, url):
            assert reply == 200
        await asyncio.sleep(0.2)


def some_replies(url: str) -> list[int]:
    return [
        httpx.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60
        ).status_code
        for _ in range(4)
    ]


def haproxy_folder(mark: str) -> Path:
    """Where a launch keeps HAProxy's files; each of its processes is told."""
    (pid, *_) = marked_processes(mark)
    for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if item.startswith(b"RAY_SERVE_HAPROXY_SOCKET_PATH="):
            return Path(item.decode().partition("=")[2]).parent
    raise AssertionError("no HAProxy")


def served_to_the_network(mark: str) -> list[str]:
    """Pages of the API or of HAProxy's statistics that a launch serves off loopback."""
    open_ports = set()
    for pid in marked_processes(mark):
        sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address, _, port = fields[1].rpartition(":")
                listens = fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets
                if listens and address != "0100007F":
                    open_ports.add(int(port, 16))
    assert open_ports, "Ray's own processes listen on all interfaces"
    contents = {"/v1/models": "manta-small", "/stats": "Statistics Report for HAProxy"}
    found = []
    for port in open_ports:
        for page, content in contents.items():
            try:
                reply = httpx.get(f"http://127.0.0.1:{port}{page}", timeout=5)
            except httpx.HTTPError:  # most of Ray's ports speak gRPC
                continue
            if content in reply.text:
                found.append(f"{port}{page}")
    return found
