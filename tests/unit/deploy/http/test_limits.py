"""What one request may take at most, and that large ones don't hold up the others."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from deploy.http import body as body_module
from deploy.http.api import build_api
from deploy.http.engine_client import EngineHealth
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.api_calls import CHAT, COMPLETIONS, USER, call, error_of, post
from tests.support.fake_client import FakeEngineClient


def refused(path: str, client: FakeEngineClient, settings: ApiSettings, **body: Any) -> Any:
    reply = call(client, "POST", path, json=body, api_settings=settings)
    assert reply.status_code == 400, reply.text
    return error_of(reply)


def test_tokens_of_a_request() -> None:
    settings = ApiSettings(ServerOptions(max_request_tokens=100))
    client = FakeEngineClient()
    body: dict[str, Any] = {"prompt": [[1] * 10, [2] * 20], "n": 2}  # 60 tokens of prompts
    for path, fields in (
        (COMPLETIONS, {**body, "max_tokens": 11}),
        (CHAT, {"messages": [USER]}),  # its default is what the context leaves
        ("/v1/embeddings", {"input": [[1] * 50, [2] * 51]}),
    ):
        error = refused(path, client, settings, **fields)
        assert error["code"] == "request_too_large" and "at most 100" in error["message"]
    sampling = {"max_new_tokens": 91}
    reply = call(
        client, "POST", "/generate", json={"input_ids": [1] * 10, "sampling_params": sampling},
        api_settings=settings,
    )  # fmt: skip
    assert reply.status_code == 400 and "at most 100" in reply.text
    assert client.started == []
    fits = {**body, "max_tokens": 10}
    assert call(client, "POST", COMPLETIONS, json=fits, api_settings=settings).status_code == 200


def test_reported_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.http.generation.plan.MAX_REPORTED_LOGPROBS", 100)
    settings, client = ApiSettings(), FakeEngineClient()
    for fields in (
        {"prompt": [1] * 10, "max_tokens": 1, "prompt_logprobs": 10},
        {"prompt": [1] * 10, "max_tokens": 1, "prompt_logprobs": 1, "n": 6},
        {"prompt": [1], "max_tokens": 17, "logprobs": 5},
        {"prompt": [1], "max_tokens": 10, "logprobs": 1, "logprob_token_ids": [*range(10)]},
    ):
        error = refused(COMPLETIONS, client, settings, **fields)
        assert "at most 100" in error["message"] and error["param"] == "max_tokens"
    fits = post(COMPLETIONS, client, prompt=[1], max_tokens=16, logprobs=5)
    assert fits.status_code == 200
    # What the context leaves would be more: the default is reduced.
    reply = post(CHAT, client, messages=[USER], logprobs=True, top_logprobs=9)
    assert reply.json()["usage"]["completion_tokens"] == 10
    reply = post(CHAT, client, messages=[USER], logprobs=True, top_logprobs=4, n=2)
    assert reply.json()["usage"]["completion_tokens"] == 20


def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    parse = body_module.parse_request

    def parse_here(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse(*args)

    monkeypatch.setattr(body_module, "parse_request", parse_here)
    long = {"role": "user", "content": "a" * body_module.LARGE_BODY}
    client = FakeEngineClient()
    assert post(CHAT, client, messages=[USER], max_tokens=1).status_code == 200
    assert post(CHAT, client, messages=[long]).status_code == 400  # too long for the context
    bad = post("/tokenize", client, messages=[long], nonsense=1)
    assert error_of(bad)["param"] == "nonsense"
    assert threads == [True, False, False]


def test_a_body_of_too_many_values_is_refused() -> None:
    many = [[]] * (body_module.MAX_CONTAINERS + 1)
    for path, fields in ((CHAT, {"metadata": {"a": many}}), ("/v1/responses", {"input": many})):
        reply = post(path, FakeEngineClient(), **{"messages": [USER]} | fields)
        assert reply.status_code == 400
        assert "more than 100000 JSON objects and arrays" in error_of(reply)["message"]


def test_a_body_above_the_limit_is_refused() -> None:
    for size in (4 * 2**20, 1024):
        settings = ApiSettings(ServerOptions(max_body_bytes=size))
        data = json.dumps({"prompt": "a" * size}).encode()
        headers = {"Content-Type": "application/json"}
        reply = call(
            FakeEngineClient(), "POST", COMPLETIONS, content=data, headers=headers,
            api_settings=settings,
        )  # fmt: skip
        assert reply.status_code == 413 and str(size) in error_of(reply)["message"]


def test_many_who_ask_for_health_ask_the_engines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.http.api.HEALTH_FRESH_S", 3600.0)
    asked = 0

    class Client(FakeEngineClient):
        async def health(self) -> EngineHealth:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.01)
            return EngineHealth(asked == 1, "sick")

    client = Client()

    async def run() -> list[int]:
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            first = await asyncio.gather(*(http.get("/health") for _ in range(50)))
            again = await http.get("/ping")
        return [reply.status_code for reply in (*first, again)]

    assert asyncio.run(run()) == [200] * 51
    assert asked == 1
