"""Keys on a real server with two ingresses: quotas, removal, caches, shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.servers import ManagedServer
from deploy.http.access.key_file import CHECK_EVERY_S
from deploy.http.access.quotas import SHARE_EVERY_S
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.http_server import manta

ROWS, OF_A, QUEUED = 32, 16, 500
ENTRIES = (
    entry("a", max_running=OF_A),
    entry("b"),
    entry("few", tokens_per_minute=600),
    entry("short", max_queued_tokens=1000),
    entry("root", role="admin"),
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, *ENTRIES)
    return path


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[ManagedServer]:
    with manta(
        ingress_replicas=2,
        api_keys_file=str(keys),
        max_running_requests=ROWS,
        max_queued_requests=2 * QUEUED,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ManagedServer) -> str:
    return server.base_url


def ask(url: str, key: str, prompt: list[int], **more: Any) -> httpx.Response:
    """On a connection of its own, so that either ingress may get it."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(key), timeout=60)


def prompt(length: int, first: int) -> list[int]:
    return [(first * 7 + i) % 3000 + 10 for i in range(length)]


def until_all(url: str, key: str, status: int, **more: Any) -> None:
    """Wait until eight answers on eight connections have this status."""
    deadline = time.monotonic() + 30
    while {ask(url, key, prompt(8, i), **more).status_code for i in range(8)} != {status}:
        assert time.monotonic() < deadline


def until_all_healthy(url: str) -> None:
    """The server is ready once one ingress is. Each gives its last answer again for half a second,
    also one from before the engine was there."""
    deadline = time.monotonic() + 30
    while {httpx.get(f"{url}/health", timeout=30).status_code for _ in range(8)} != {200}:
        assert time.monotonic() < deadline


def test_only_keys_pass(url: str) -> None:
    until_all_healthy(url)
    for path, none, user, admin in (
        ("/health", 200, 200, 200),
        ("/v1/models", 401, 200, 200),
        ("/metrics", 401, 403, 200),
        ("/server_info", 401, 403, 200),
        ("/nothing", 401, 404, 404),
    ):
        with httpx.Client(base_url=url, timeout=30) as client:
            found = [
                client.get(path, headers=headers).status_code
                for headers in ({}, bearer("a"), bearer("root"))
            ]
        assert found == [none, user, admin], path


def test_a_quota_holds_over_both_ingresses(url: str) -> None:
    """What one ingress let in the other knows a second later, also if it had no request yet."""
    body = {"max_tokens": 1, "temperature": 0}
    with httpx.Client(base_url=url, headers=bearer("few"), timeout=60) as one_ingress:
        for at in range(4):
            one_ingress.post("/v1/completions", json={"prompt": prompt(300, at), **body})
    time.sleep(2 * SHARE_EVERY_S + 1)
    replies = [ask(url, "few", prompt(300, 10 + at)) for at in range(8)]
    assert [reply.status_code for reply in replies] == [429] * 8
    assert all(0 < int(reply.headers["retry-after"]) <= 90 for reply in replies)


def test_a_prompt_that_could_never_wait(url: str) -> None:
    reply = ask(url, "short", prompt(1001, 3))
    assert reply.status_code == 400 and "1000" in reply.text
    assert ask(url, "short", prompt(999, 3)).status_code == 200


def test_prompts_are_cached_for_one_key(url: str) -> None:
    def cached(key: str) -> int:
        usage = ask(url, key, prompt(400, 50)).json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    assert cached("a") == 0
    assert cached("a") > 300
    assert cached("b") == 0
    assert cached("b") > 300


def test_a_queue_of_one_key_does_not_hold_up_another(url: str) -> None:
    """Of 500 requests with key A at most 16 run, and B's come in between at once."""

    async def check() -> None:
        done = 0
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as session:

            async def send(key: str, first: int, max_tokens: int) -> dict[str, Any]:
                nonlocal done
                body = {"prompt": prompt(40, first), "max_tokens": max_tokens, "ignore_eos": True}
                async with session.post("/v1/completions", json=body, headers=bearer(key)) as reply:
                    assert reply.status == 200, await reply.text()
                    result: dict[str, Any] = await reply.json()
                done += key == "a"
                return result

            tasks = [asyncio.create_task(send("a", i, 64)) for i in range(QUEUED)]
            state = await until_state(session, lambda s: s["num_waiting"] > QUEUED // 2)
            assert state["num_running"] <= OF_A
            for at in range(5):
                before = done
                await send("b", 1000 + at, 1)
                # A's requests run side by side and end in groups.
                assert done - before <= 2 * OF_A
                state = await until_state(session, lambda s: s["num_running"] > 0)
                assert state["num_running"] <= OF_A + 1
            assert any(not task.done() for task in tasks)
            results = await asyncio.gather(*tasks)
        assert all(result["usage"]["completion_tokens"] == 64 for result in results)

    asyncio.run(check())


async def until_state(session: aiohttp.ClientSession, condition: Any) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            async with session.get("/server_info", headers=bearer("root")) as reply:
                state: dict[str, Any] = (await reply.json())["internal_states"][0]
            if condition(state):
                return state
            await asyncio.sleep(0.05)


def test_a_removed_key_is_refused_and_its_stream_ends_well(url: str, keys: Path) -> None:
    body = {"prompt": prompt(8, 1), "max_tokens": 600, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body, headers=bearer("b")) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        try:
            write_keys(keys, *(each for each in ENTRIES if each["name"] != "b"))
            time.sleep(CHECK_EVERY_S + 1)
            until_all(url, "b", 401)
            assert ask(url, "a", prompt(8, 2)).status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        finally:
            write_keys(keys, *ENTRIES)
    until_all(url, "b", 200)


def test_metrics_by_key(url: str) -> None:
    text = httpx.get(f"{url}/metrics", headers=bearer("root"), timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith("manta_key_generation_tokens")]
    of_a = sum(float(line.rpartition(" ")[2]) for line in lines if 'key="a"' in line)
    assert of_a >= QUEUED * 64
    assert 'reason="unauthorized"' in text and 'reason="forbidden"' in text
