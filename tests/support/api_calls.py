"""Calls of the HTTP application in process, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import httpx

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from tests.support.fake_client import FakeEngineClient

USER = {"role": "user", "content": "hi"}
JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def call(
    client: FakeEngineClient,
    method: str,
    path: str,
    *,
    api_settings: ApiSettings | None = None,
    **options: Any,
) -> httpx.Response:
    """One request to a fresh application in this process."""

    async def run() -> httpx.Response:
        app = build_api(lambda: ServedModels(client), api_settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reply = await http.request(method, path, **options)
        if app.state.store is not None:
            await app.state.store.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return reply

    return asyncio.run(run())


def post(path: str, client: FakeEngineClient | None = None, **body: Any) -> httpx.Response:
    return call(client or FakeEngineClient(), "POST", path, json=body)


def complete(client: FakeEngineClient | None = None, **body: Any) -> dict[str, Any]:
    reply = post(COMPLETIONS, client, **{"prompt": "abc", "seed": 5, "max_tokens": 4} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def chat(client: FakeEngineClient | None = None, **body: Any) -> dict[str, Any]:
    reply = post(CHAT, client, **{"messages": [USER], "seed": 5, "max_tokens": 4} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def events(reply: httpx.Response) -> list[Any]:
    """The events of a stream; the last must be [DONE], unless it is an error."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("\n\n")
    lines = reply.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    if payloads[-1] != "[DONE]":
        assert "error" in json.loads(payloads[-1])
        return [json.loads(payload) for payload in payloads]
    assert "[DONE]" not in payloads[:-1]
    return [json.loads(payload) for payload in payloads[:-1]]


def named_events(reply: httpx.Response) -> list[dict[str, Any]]:
    """What the events of a stream hold, with names or without."""
    assert reply.status_code == 200, reply.text
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def joined_lists(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]
