"""`Server`: the application with a store of requests, and an engine that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
from fastapi import FastAPI

from deploy.http.api import build_api
from deploy.http.metrics import ServerMetrics
from deploy.http.openai.responses.replies import Response
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.fake_client import FakeEngineClient


class Server:
    """The application with a store, and what its engine was asked."""

    def __init__(self, http: httpx.AsyncClient, client: FakeEngineClient, app: FastAPI) -> None:
        self.http, self.client, self.app = http, client, app
        self.metrics: ServerMetrics = app.state.metrics

    async def respond(self, text: Any, **fields: Any) -> dict[str, Any]:
        headers = fields.pop("headers", {})
        body = {"input": text, "max_output_tokens": 50, **fields}
        reply = await self.http.post("/v1/responses", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        Response.model_validate(found)
        return found

    async def refusal(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        reply = await self.http.request(method, path, **options)
        assert reply.status_code >= 400, reply.text
        return reply.status_code, reply.json()["error"]

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """What the engine was asked last."""
        return [(message["role"], message["content"]) for message in self.messages]

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.chat_calls[-1]["messages"]
        return found


class OneProcess:
    """One process of a server whose records and files are in a folder, which others share. `lose`
    ends it without a word."""

    def __init__(self, folder: Path, base_url: str = "http://test", **options: Any) -> None:
        self.client = FakeEngineClient(4096)
        places = {
            "request_store_path": str(folder / "r.sqlite3"),
            "file_store": str(folder / "files"),
        }
        server = ServerOptions(**{**places, **options})
        self.app = build_api(lambda: ServedModels(self.client), ApiSettings(server))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=base_url)

    async def __aenter__(self) -> Self:
        self.app.state.runner.start()
        return self

    async def lose(self) -> None:
        """Its tasks end; what they would write then is lost with it."""
        store, files = self.app.state.store, self.app.state.files

        async def nothing(*_: Any, **__: Any) -> None: ...

        store.leave = store.end = store.delete = store.forget = store.progress = nothing
        files.add = files.add_part = nothing
        await self.app.state.runner.stop()

    async def __aexit__(self, *_: object) -> None:
        await self.app.state.runner.stop()
        await self.app.state.store.close()
        await self.http.aclose()


def options(tmp_path: Path, **more: Any) -> ServerOptions:
    return ServerOptions(request_store_path=str(tmp_path / "store" / "records.sqlite3"), **more)


@asynccontextmanager
async def serve(server: ServerOptions) -> AsyncIterator[Server]:
    client = FakeEngineClient(4096, tool_format="hermes", reasons=False)
    client.script = "fine"
    app = build_api(lambda: ServedModels(client), ApiSettings(server))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Server(http, client, app)
    if app.state.store is not None:
        await app.state.store.close()


def run(server: ServerOptions, scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with serve(server) as running:
            await scenario(running)

    asyncio.run(all_of_it())
