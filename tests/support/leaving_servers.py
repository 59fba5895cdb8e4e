"""Servers for clients that leave, and what must be true of them afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.common import REPO_ROOT
from benchmarks.servers import ManagedServer
from tests.support.http_server import manta, metric, serve_run
from tests.support.leaving import WAYS, Client, Way, covering
from tests.support.processes import cpu_seconds_by_process

ROWS = 256
FREE_WITHIN_S = 2.0
IDLE_S = 10.0
MAX_IDLE_SHARE = 0.05
SERVES_OWN = ("ServeController", "gcs_server", "raylet", "dashboard", "runtime_env", "monitor")
"""Ray's own processes, which are never idle: about 4 % for Serve's controller alone."""
SETTINGS: dict[str, Any] = {
    "served_model_name": "long",
    "device": "simulated",
    "simulated": {"step_ms": 20.0, "token_us": 100.0},
    "max_total_tokens": 4_194_304,
    "max_running_requests": ROWS,
}


@contextmanager
def long_model() -> Iterator[str]:
    """The small model with a context of 32 k, so that requests run for long."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(REPO_ROOT / "models/manta-small", Path(folder) / "long"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": 32_768})
        )
        yield str(model)


@contextmanager
def as_in_a_pod(model: str) -> Iterator[ManagedServer]:
    """A server with the environment of the manifests' pods. Only the path of the sources and the
    home differ, and HAProxy's files have their own folder."""
    lines = (REPO_ROOT / "k8s/base/environment.env").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    env = {key: value.replace("/opt/manta", str(REPO_ROOT)) for key, value in pairs.items()}
    del env["HOME"]
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env["PYTHONPATH"] = str(REPO_ROOT)
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_FILE"):
            env[f"RAY_SERVE_HAPROXY_{name}"] = f"{folder}/{name[:8].lower()}"
        env["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = folder
        with serve_run(env, model=model, **SETTINGS) as server:
            yield server


COMPUTING = {k: v for k, v in SETTINGS.items() if k not in ("device", "simulated")} | {
    "max_total_tokens": 131_072,
    "schedule_conservativeness": 0.01,  # admits all rows
    "cpu_threads": 1,
}

SERVERS: dict[str, Callable[[str], Any]] = {
    "haproxy": lambda model: manta(model=model, **SETTINGS),
    "python": lambda model: manta(haproxy=False, model=model, **SETTINGS),
    "pod": as_in_a_pod,
    "computing": lambda model: manta(model=model, **COMPUTING),
}
"""Servers by name, made from a model folder; "pod" has the environment of the CPU manifest."""


@contextmanager
def running(name: str) -> Iterator[ManagedServer]:
    """One of `SERVERS` with the long model."""
    with long_model() as model, SERVERS[name](model) as server:
        yield server


def behind(*names: Any) -> pytest.MarkDecorator:
    """A test's fixture `server` is each of these `SERVERS`, one after the other."""
    return pytest.mark.parametrize("server", names, indirect=True, scope="module")


async def until_free(url: str, limit_s: float, in_flight: int = 0) -> float:
    """Seconds until no more than `in_flight` requests are anywhere in the server."""
    started = time.monotonic()
    names = ("manta_requests_in_flight", "manta_engine_num_running", "manta_engine_num_waiting")
    while True:
        counts = [await asyncio.to_thread(metric, url, name) for name in names]
        took = time.monotonic() - started
        if counts[0] <= in_flight and sum(counts[1:]) <= in_flight * ROWS:
            return took
        assert took < limit_s, f"after {took:.1f} s: {dict(zip(names, counts, strict=True))}"
        await asyncio.sleep(0.05)


async def until_metric(url: str, name: str, least: float) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(metric, url, name) < least:
            await asyncio.sleep(0.05)


async def leave_at_once(server: ManagedServer, way: Way, count: int) -> float:
    """Let `count` clients ask and leave together. Returns the seconds until their requests are
    gone."""
    fillers = 2 if way.phase == "queue" else 0
    async with all_rows_taken(server.base_url, fillers):
        clients = [Client(server.port, way, number) for number in range(count)]
        await asyncio.gather(*(client.ask() for client in clients))
        if way.phase == "decode" and way.stream:
            await asyncio.gather(*(client.read_some() for client in clients))
        else:
            await until_metric(server.base_url, "manta_requests_in_flight", count + fillers)
        for client in clients:
            client.leave()
        took = await until_free(server.base_url, FREE_WITHIN_S, fillers)
        await asyncio.gather(*(client.gone() for client in clients))
    await until_free(server.base_url, FREE_WITHIN_S)
    return took


@asynccontextmanager
async def all_rows_taken(url: str, fillers: int) -> AsyncIterator[None]:
    """Take all rows with `fillers` requests (0: none), which leave at the end."""
    body = {"prompt": [9, 9], "max_tokens": 30_000, "n": ROWS // 2, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        ask = partial(session.post, f"{url}/v1/completions", json=body)
        asked = [asyncio.ensure_future(ask()) for _ in range(fillers)]
        if asked:
            await until_metric(url, "manta_engine_num_running", ROWS)
        yield
        for request in asked:
            request.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def idle_shares(server: ManagedServer) -> dict[str, float]:
    """Share of a core that each process takes while nothing is asked."""
    before = cpu_seconds_by_process(server.pid)
    time.sleep(IDLE_S)
    after = cpu_seconds_by_process(server.pid)
    return {name: (s - before.get(name, s)) / IDLE_S for name, s in after.items()}


def check_idle(server: ManagedServer, at_first: dict[str, float]) -> None:
    """No process computes for clients that are gone: none takes much, and twice as much as before
    they came (`at_first`). A second of an idle process is dearer on a machine that others use."""
    shares = idle_shares(server)
    busy = {
        name: share
        for name, share in shares.items()
        if share > max(MAX_IDLE_SHARE, 2 * at_first.get(name, 0.0))
    }
    print(
        ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items()) if share > 0.01)
    )
    assert not [name for name in busy if not any(own in name for own in SERVES_OWN)], busy


def check_covering(server: ManagedServer) -> None:
    """Some of all ways, in which all pairs of properties occur, with 40 clients each."""
    at_first = idle_shares(server)
    for way in covering(WAYS):
        try:
            took = asyncio.run(leave_at_once(server, way, 40))
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from error
        print(f"{way}: {took:.2f} s")
    check_idle(server, at_first)
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=30).status_code == 200


def check_headers(server: ManagedServer) -> None:
    """What Ray Serve can't read ends in no plain 500, and the id is the same everywhere."""
    for name in ("X-Request-Id", "serve_multiplexed_model_id", "x-session-id"):
        for value in (b"\xff\xfe", "é".encode()):
            reply = httpx.post(
                f"{server.base_url}/v1/completions",
                json={"prompt": "x", "max_tokens": 2, "ignore_eos": True},
                headers=[(name.encode(), value)],
                timeout=30,
            )
            assert reply.status_code == 200, reply.text
            (id_,) = reply.headers.get_list("x-request-id")
            assert reply.json()["id"] == f"cmpl-{id_}"


def check_early_cancels(server: ManagedServer) -> None:
    """200 clients that leave while their requests are being taken, ten times."""
    way = Way(1, False, "decode", False, "close")

    async def leave_early(delay_s: float) -> None:
        clients = [Client(server.port, way, number) for number in range(200)]
        await asyncio.gather(*(client.ask() for client in clients))
        await asyncio.sleep(delay_s)
        for client in clients:
            client.leave()
        await asyncio.gather(*(client.gone() for client in clients))
        await until_free(server.base_url, 2 * FREE_WITHIN_S)

    for turn in range(10):
        asyncio.run(leave_early(turn * 0.02))


def check_every_way(server: ManagedServer) -> None:
    """All ways ten times over, 200 clients each."""
    at_first = idle_shares(server)
    for way in WAYS:
        took = [asyncio.run(leave_at_once(server, way, 200)) for _ in range(10)]
        print(f"{way}: free after {min(took):.2f} to {max(took):.2f} s", flush=True)
    check_idle(server, at_first)


CHECKS = (
    pytest.param(check_covering, id="a-request-ends-with-its-client"),
    pytest.param(check_early_cancels, id="early-cancels-lose-no-request"),
    pytest.param(check_headers, id="headers-that-serve-cannot-read"),
)
