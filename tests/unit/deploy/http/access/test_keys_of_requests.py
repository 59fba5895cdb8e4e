"""What a key means for a request: its part of the cache, priority, limits, metrics and aborts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.http.access import key_file
from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.api_calls import CHAT, COMPLETIONS, USER, call
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.fake_client import FakeEngineClient

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc", "max_tokens": 2},
    CHAT: {"messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 16},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 2}},
    "/v1/embeddings": {"input": "abc"},
    "/v1/score": {"text_1": "abc", "text_2": "b"},
}


@pytest.fixture
def keys(tmp_path: Path) -> ApiSettings:
    limits = {"max_running": 3, "max_queued_tokens": 50}
    path = write_keys(
        tmp_path / "keys.yaml",
        entry("a", **limits),
        entry("b", lowest_priority=2),
        entry("few", tokens_per_minute=60),
        entry("root", role="admin"),
    )
    return ApiSettings(ServerOptions(api_keys_file=path))


@pytest.mark.parametrize("path", BODIES)
def test_what_reaches_the_engine(keys: ApiSettings, path: str) -> None:
    for name, priority, limits in (("a", 0, ("a", 3, 50)), ("b", 2, ("b", None, None))):
        client = FakeEngineClient()
        reply = call(
            client, "POST", path, json=BODIES[path], headers=bearer(name), api_settings=keys
        )
        assert reply.status_code == 200, reply.text
        for request in client.started:
            assert request.key is not None and request.priority == priority
            assert (
                request.key.name,
                request.key.max_running,
                request.key.max_queued_tokens,
            ) == limits
            assert request.namespace == f"{name}/"


def test_salts_of_two_keys_never_meet(keys: ApiSettings) -> None:
    salts = set()
    for name, salt in (("a", ""), ("a", "b/"), ("b", ""), ("b", "a/"), ("a", "/"), ("b", "/")):
        client = FakeEngineClient()
        body = {**BODIES[COMPLETIONS], **({"cache_salt": salt} if salt else {})}
        call(client, "POST", COMPLETIONS, json=body, headers=bearer(name), api_settings=keys)
        salts.add(client.started[0].namespace)
    assert len(salts) == 6


def test_priority(keys: ApiSettings) -> None:
    for name, given, status in (("a", -1, 400), ("a", 7, 200), ("b", 1, 400), ("b", 3, 200)):
        body = {**BODIES[COMPLETIONS], "priority": given}
        reply = call(FakeEngineClient(), "POST", COMPLETIONS, json=body, headers=bearer(name),
                     api_settings=keys)  # fmt: skip
        assert reply.status_code == status
        assert status == 200 or reply.json()["error"]["param"] == "priority"


def test_without_keys_nothing_changes() -> None:
    client = FakeEngineClient()
    body = {**BODIES[COMPLETIONS], "cache_salt": "s", "priority": -3}
    reply = call(client, "POST", COMPLETIONS, json=body, headers=bearer("anything"))
    assert reply.status_code == 200
    request = client.started[0]
    assert (request.key, request.namespace, request.priority) == (None, "s", -3)


def test_quota(keys: ApiSettings) -> None:
    async def check() -> None:
        client = FakeEngineClient()
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client), keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def ask(path: str, name: str = "few", **more: Any) -> httpx.Response:
                return await http.post(path, json={**BODIES[path], **more}, headers=bearer(name))

            assert (await ask(COMPLETIONS, prompt="a" * 40, max_tokens=30)).status_code == 200
            for path in BODIES:
                reply = await ask(path)
                assert reply.status_code == 429, path
                assert 10 < int(reply.headers["retry-after"]) <= 20
                assert "60 tokens per minute" in reply.text
                assert (await ask(path, "a")).status_code == 200
            assert (await ask("/v1/messages")).json()["error"]["type"] == "rate_limit_error"
            stream = await ask(CHAT, stream=True)
            assert stream.status_code == 429, "before the stream begins"
            metrics = (await http.get("/metrics", headers=bearer("root"))).text
        assert "manta_key_prompt_tokens_total{" in metrics and 'key="few"' in metrics

    asyncio.run(check())


def test_a_key_aborts_its_own(keys: ApiSettings) -> None:
    async def check() -> None:
        client = FakeEngineClient()
        client.hang_at = 1
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client), keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def generate(name: str, rid: str) -> httpx.Response:
                body = {**BODIES["/generate"], "rid": rid}
                return await http.post("/generate", json=body, headers=bearer(name))

            async def abort(name: str, **body: Any) -> None:
                reply = await http.post("/abort_request", json=body, headers=bearer(name))
                assert reply.status_code == 200
                for _ in range(10):
                    await asyncio.sleep(0)

            tasks = {
                rid: asyncio.create_task(generate(rid[0], rid)) for rid in ("a1", "a2", "b1", "b2")
            }
            while len(client.started) < 4:
                await asyncio.sleep(0)
            await abort("a", rid="b1")
            assert client.aborted == []
            await abort("b", rid="b1")
            assert len(client.aborted) == 1
            await abort("a", abort_all=True)
            assert len(client.aborted) == 3 and not tasks["b2"].done()
            await abort("root", rid="b2")
            for task in tasks.values():
                assert (await task).status_code == 200

    asyncio.run(check())


def test_a_removed_key(keys: ApiSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next request is refused; its open stream goes on."""
    monkeypatch.setattr(key_file, "CHECK_EVERY_S", 0.0)

    async def check() -> None:
        client = FakeEngineClient()
        client.step_s = 0.01
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client), keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {**BODIES[COMPLETIONS], "max_tokens": 30, "stream": True, "seed": 1}
            stream = asyncio.create_task(http.post(COMPLETIONS, json=body, headers=bearer("a")))
            while not client.started:
                await asyncio.sleep(0.001)
            write_keys(Path(str(keys.server.api_keys_file)), entry("b"))
            reply = await http.post(COMPLETIONS, json=body, headers=bearer("a"))
            assert reply.status_code == 401
            assert (await stream).text.endswith("data: [DONE]\n\n")

    asyncio.run(check())


def test_a_slow_body() -> None:
    settings = ApiSettings(ServerOptions(body_timeout_s=0.05))

    async def slow() -> Any:
        yield b'{"prompt": '
        await asyncio.sleep(5)

    for path, place in (("/v1/completions", "error"), ("/tokenize", "error")):
        headers = {"content-type": "application/json"}
        reply = call(FakeEngineClient(), "POST", path, content=slow(), headers=headers,
                     api_settings=settings)  # fmt: skip
        assert reply.status_code == 408 and "0.05 s" in reply.json()[place]["message"]
