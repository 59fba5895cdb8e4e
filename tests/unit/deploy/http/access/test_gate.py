"""Who may use which path, over raw sockets: no `Host`, path, method or header opens a way in."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Iterator

import pytest
from starlette.routing import Route

from deploy.http.api import access_rules, build_api
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.api_keys import entry, write_keys
from tests.support.fake_client import FakeEngineClient
from tests.support.http_application import Server
from tests.support.raw_http import (
    ADMIN,
    HEADERS,
    HOSTS,
    METHODS,
    NO_ROUTES,
    OPEN,
    PATHS,
    USER,
    ask,
    raw,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, entry("user"), entry("admin", role="admin"))
    running = Server(FakeEngineClient(), ApiSettings(ServerOptions(api_keys_file=str(path))))
    running.start()
    yield running
    running.stop()


def test_every_route_has_a_level() -> None:
    """A new route is for admins until somebody says otherwise, here and in the code."""
    app = build_api(lambda: ServedModels(FakeEngineClient()))
    rules = access_rules(app)
    found: dict[str, set[str]] = {"open": set(), "user": set(), "admin": set()}
    for route in app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{name}", "x.js").replace("{model:path}", "a/b")
        for method in (route.methods or set()) - {"HEAD"}:
            found[rules.level(method, path)].add(route.path)
    assert found["open"] == OPEN
    assert found["admin"] == ADMIN
    assert found["user"] == USER


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_without_a_key(server: Server, host: str) -> None:
    """CVE-2026-48746: a `Host` with a path in it made protected paths look public."""
    paths = sorted(ADMIN | USER | NO_ROUTES)
    for path, method in itertools.product(paths, ("GET", "POST")):
        path = path.replace("{model:path}", "fake")
        status, answer = ask(server.port, raw(method, path, host=host, body=b"{}"))
        assert status in (400, 401), (path, method, answer)
        assert b"manta_" not in answer and b'"fake"' not in answer


@pytest.mark.parametrize("path", PATHS)
def test_no_spelling_of_a_path_opens_it(server: Server, path: str) -> None:
    for method in METHODS:
        status, answer = ask(server.port, raw(method, path))
        if path.startswith("/docs/assets/") and method == "GET":
            assert status in (400, 401, 404, 422), answer
        else:
            assert status in (400, 401, 404, 405), (method, answer)
        assert b"manta_requests" not in answer


@pytest.mark.parametrize("header", HEADERS)
def test_wrong_keys(server: Server, header: str) -> None:
    status, answer = ask(server.port, raw("GET", "/v1/models", header))
    assert status == 401, answer
    assert b"www-authenticate: Bearer" in answer


@pytest.mark.parametrize(
    "header", ["Authorization: Bearer user", "authorization: bearer user", "X-API-Key: user"]
)
def test_keys_and_roles(server: Server, header: str) -> None:
    assert ask(server.port, raw("GET", "/v1/models", header))[0] == 200
    assert ask(server.port, raw("GET", "/nothing", header))[0] == 404
    for path in sorted(ADMIN):
        assert ask(server.port, raw("GET", path, header))[0] == 403
        status = ask(server.port, raw("GET", path, header.replace("user", "admin")))[0]
        assert status in (200, 405)  # some are for POST only
    assert ask(server.port, raw("GET", "/health"))[0] == 200
    status, script = ask(server.port, raw("GET", "/docs/assets/swagger-ui-bundle.js"))
    assert status == 200 and len(script) > 100_000


def test_docs_load_nothing_from_elsewhere(server: Server) -> None:
    page = ask(server.port, raw("GET", "/docs", "X-Api-Key: admin"))[1].decode()
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(loaded) == 3 and all(url.startswith("/docs/assets/") for url in loaded)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", ("error", "code")),
        ("/v1/messages", ("error", "type")),
        ("/generate", ("error", "message")),
    ],
)
def test_refusals_in_each_apis_words(server: Server, path: str, place: tuple[str, str]) -> None:
    status, answer = ask(server.port, raw("POST", path, body=b'{"max_tokens": 1}'))
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    assert status == 401 and error[place[0]][place[1]]
    if place[1] != "message":
        assert error[place[0]][place[1]] in ("invalid_api_key", "authentication_error")


def test_a_body_is_not_read_without_a_key(server: Server) -> None:
    """The answer comes while the client still has a gigabyte to send."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n{"
        )
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401")


def test_websockets_are_closed(server: Server) -> None:
    upgrade = raw(
        "GET", "/v1/models", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ).replace(b"Connection: close", b"Connection: Upgrade")  # fmt: skip
    assert ask(server.port, upgrade)[0] in (400, 401, 403)
