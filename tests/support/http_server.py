"""A running Manta for tests, and calls of it over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import yaml

from benchmarks.common import REPO_ROOT
from benchmarks.servers import ManagedServer, free_port
from deploy.http.sse_decoder import DONE, SSEDecoder
from deploy.start.processes import marked_processes
from tests.support.metrics_text import bare
from tests.support.processes import SharedMemory, launch_mark

START_TIMEOUT_S = 180.0


@contextmanager
def manta(
    config: str = "configs/llama.yaml", *, haproxy: bool = True, **overrides: Any
) -> Iterator[ManagedServer]:
    """`deploy.launch` on a free port with keys of the config overridden."""
    port = free_port()
    cmd = [sys.executable, "-m", "deploy.launch", config, "--port", str(port), "--verbose"]
    cmd += [] if haproxy else ["--no-haproxy"]
    for key, value in overrides.items():
        cmd += ["--set", f"{key}={json.dumps(value)}"]
    with ManagedServer(cmd, None, port, timeout_s=START_TIMEOUT_S, stop_timeout_s=60.0) as server:
        yield server


@contextmanager
def manta_leaving_nothing(config: str, **overrides: Any) -> Iterator[ManagedServer]:
    """As `manta`; once it is stopped, no process and no shared memory of it may be left."""
    shared = SharedMemory()
    with manta(config, **overrides) as server:
        mark = launch_mark(server.pid)
        yield server
    assert not server.killed, "the server had to be killed to stop"
    assert marked_processes(mark) == [], "processes left behind"
    assert not (left := shared.left()), f"shared memory left behind: {left}"


@contextmanager
def serve_run(env: Mapping[str, str] | None = None, **overrides: Any) -> Iterator[ManagedServer]:
    """Plain `serve run` of configs/llama.yaml, without the launcher. `env` is added to this
    process's environment."""
    config = yaml.safe_load((REPO_ROOT / "configs/llama.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    config["applications"][0]["args"] |= overrides
    serve = str(Path(sys.executable).with_name("serve"))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        environ = {**os.environ, **(env or {})}
        with ManagedServer([serve, "run", file.name], environ, port, timeout_s=180) as server:
            yield server


@dataclass
class Streamed:
    """The result of one streaming completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    usage: dict[str, Any] | None = None
    status: int = 0
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    """When it was sent and when its chunks came, by the monotonic clock."""


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    cut_after: int | None = None,
    on_begun: Callable[[], None] | None = None,
) -> Streamed:
    """POST /v1/completions with stream=true. `on_begun` is called at the first chunk; the
    connection is dropped after `cut_after` chunks."""
    got = Streamed(started=time.monotonic())
    payload = {"stream": True, "return_token_ids": True, **body}
    async with session.post(f"{url}/v1/completions", json=payload) as reply:
        got.status = reply.status
        if reply.status != 200:
            got.error = (await reply.json())["error"]
            return got
        seen = 0
        async for event in _events(reply):
            if event == DONE:
                got.done = True
                break
            got.times.append(time.monotonic())
            chunk = json.loads(event)
            if "error" in chunk:
                got.error = chunk["error"]
                break
            got.usage = chunk.get("usage") or got.usage
            for choice in chunk["choices"]:
                got.text += choice["text"]
                got.token_ids += choice.get("token_ids") or []
                got.finish_reason = choice["finish_reason"] or got.finish_reason
            if seen == 0 and on_begun is not None:
                on_begun()
            seen += 1
            if cut_after is not None and seen >= cut_after:
                reply.close()
                break
    return got


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    decoder = SSEDecoder()
    async for part in reply.content.iter_any():
        for data in decoder.feed(part):
            yield data


async def streams(
    url: str,
    bodies: list[dict[str, Any]],
    cut_after: int | None = None,
    on_begun: Callable[[], None] | None = None,
) -> list[Streamed]:
    """Stream all bodies at once, each on a connection of its own."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=280)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return list(
            await asyncio.gather(
                *(stream(session, url, body, cut_after, on_begun) for body in bodies)
            )
        )


async def disturbed_streams(
    url: str, bodies: list[dict[str, Any]], then: Callable[[], object]
) -> list[Streamed]:
    """`streams`; `then` is called as soon as each has a chunk, so on any machine while they run."""
    begun = asyncio.Semaphore(0)
    reading = asyncio.ensure_future(streams(url, bodies, on_begun=begun.release))
    for _ in bodies:
        waiting = asyncio.ensure_future(begun.acquire())
        await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), reading.result()
    await asyncio.to_thread(then)
    return await reading


def sampled_body(model: str, number: int, tokens: int) -> dict[str, Any]:
    """A completion of so many tokens whose prompt and seed follow from `number`."""
    return {
        "model": model,
        "prompt": [(number * 31 + i) % 4000 + 6 for i in range(20)],
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ids_of(results: Sequence[Streamed]) -> list[list[int]]:
    """The tokens of streams, none of which may have failed."""
    assert [result.error for result in results if result.error] == []
    return [result.token_ids for result in results]


def metric(url: str, name: str) -> float:
    """Sum of a metric's samples. A scrape that the engines didn't answer in time is repeated."""
    deadline = time.monotonic() + 10.0
    while True:
        text = httpx.get(f"{url}/metrics", timeout=30).text
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if values:
            return sum(float(v) for v in values)
        late = "\nmanta_engine_stats_up 0.0\n" in bare(text) and time.monotonic() < deadline
        assert late and name.startswith("manta_engine_"), f"{name} is not among:\n{text}"


def settled_metric(url: str, name: str) -> float:
    """`metric` once it counts all that has happened: an engine says 0.1 s late what it did, and a
    scrape tells that again for half a second."""
    time.sleep(0.7)
    return metric(url, name)


def wait_idle(url: str, limit_s: float) -> None:
    """Wait until all requests have released their memory. Fails after `limit_s`, or if memory is
    lost."""
    settled_metric(url, "manta_engine_num_running")  # or it might be idle as it was before them
    names = ("num_running", "num_waiting", "kv_used_tokens")
    deadline = time.monotonic() + limit_s
    while held := {name: n for name in names if (n := metric(url, f"manta_engine_{name}"))}:
        assert time.monotonic() < deadline, held
        time.sleep(0.05)
    assert metric(url, "manta_engine_kv_leaks_total") == 0
