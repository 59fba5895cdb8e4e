"""Headers that Ray Serve would stumble over, through Serve's own middlewares."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from deploy.http.api import build_api
from deploy.http.header_guard import IMPORT_PATH, HeaderGuard
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from tests.support.api_calls import COMPLETIONS
from tests.support.fake_client import FakeEngineClient


def ask(headers: dict[str, bytes], guarded: bool = True) -> httpx.Response:
    """A completion through what Serve puts around an application, the guard outside of it."""
    from ray.serve._private.http_util import _apply_middlewares, call_function_from_import_path

    api = build_api(
        lambda: ServedModels(FakeEngineClient()), ApiSettings(add_request_id_header=False)
    )
    guard = call_function_from_import_path(IMPORT_PATH) if guarded else []
    app = _apply_middlewares(_served(api), guard)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            given = [
                (k.encode(), v) for k, v in {**headers, "content-type": b"application/json"}.items()
            ]
            return await http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=given)

    return asyncio.run(run())


def _served(api: Any) -> Any:
    """Reads headers as a replica of Serve's does before it calls the application."""
    from ray.serve._private import http_util

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        headers.get(b"x-request-id", b"").decode()
        http_util.parse_disconnect_disabled_header(headers)
        http_util.parse_request_timeout_header(headers, None)
        http_util.parse_session_id_header(headers)
        for name, value in headers.items():
            name = name.decode().lower().replace("-", "_")
            if name in ("serve_multiplexed_model_id", "traceparent", "tracestate"):
                value.decode()
        await api(scope, receive, send)

    return app


@pytest.mark.parametrize("given", [b"\xff\xfe", "é".encode(), b"", b"a b", b"x" * 129, b"\x7f"])
def test_a_request_id_that_is_not_plain_is_replaced_everywhere(given: bytes) -> None:
    reply = ask({"X-Request-Id": given})
    assert reply.status_code == 200
    (id_,) = reply.headers.get_list("x-request-id")
    assert id_.isascii() and id_ != given.decode(errors="replace")
    assert reply.json()["id"] == f"cmpl-{id_}"


def test_a_plain_request_id_is_taken_over() -> None:
    reply = ask({"X-Request-Id": b"abc-1"})
    assert reply.headers.get_list("x-request-id") == ["abc-1"]
    assert reply.json()["id"] == "cmpl-abc-1"


@pytest.mark.parametrize(
    "name",
    [
        "serve_multiplexed_model_id",
        "Serve-Multiplexed-Model-Id",
        "x-session-id",
        "X-Request-Timeout-Seconds",
        "x-request-disconnect-disabled",
        "traceparent",
    ],
)
def test_headers_that_serve_cannot_read_never_reach_it(name: str) -> None:
    assert ask({name: b"\xff"}).status_code == 200
    with pytest.raises(UnicodeDecodeError):
        ask({name: b"\xff"}, guarded=False)


def test_other_headers_pass_as_they_are() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    headers = [(b"x-mine", b"\xff"), (b"x-session-id", b"s"), (b"serve-multiplexed-model-id", b"m")]
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers}
    asyncio.run(HeaderGuard(app)(scope, None, None))  # type: ignore[arg-type]
    assert seen[0]["headers"] == headers[:2]
    asyncio.run(HeaderGuard(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen[1] == {"type": "lifespan"}


@pytest.mark.parametrize(
    ("method", "path", "is_watched"),
    [
        ("POST", "/v1/files", False),
        ("POST", "/prefix/v1/files", False),
        ("GET", "/v1/files", True),
        ("POST", "/v1/completions", True),
    ],
)
def test_uploads_come_no_faster_than_they_are_written(
    method: str, path: str, is_watched: bool
) -> None:
    """Serve would read them into memory, to notice a client that leaves."""
    from ray.serve._private.http_util import parse_disconnect_disabled_header

    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(not parse_disconnect_disabled_header(dict(scope["headers"])))

    async def nothing(*_: Any) -> None: ...

    given = [(b"x-request-disconnect-disabled", b"?1")]  # not a client's to say
    scope = {"type": "http", "method": method, "path": path, "headers": given}
    asyncio.run(HeaderGuard(app)(scope, nothing, nothing))
    assert seen == [is_watched]
