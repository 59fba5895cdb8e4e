"""Raw requests without a valid key against a real server, through either proxy: only refusals that
the documentation names, and nothing of what the server knows."""

from __future__ import annotations

import itertools
import random
import re
import socket
from collections.abc import Iterator

import pytest

from tests.support.api_keys import entry, write_keys
from tests.support.http_server import manta
from tests.support.raw_http import ADMIN, HEADERS, HOSTS, METHODS, NO_ROUTES, PATHS, USER, ask, raw

REFUSALS = {400, 401, 404, 405, 408, 413, 415, 421}
KNOWN = re.compile(rb"manta_|kv_|\"id\"|\"version\"|\"text\"|openapi|token_ids")
"""What only answers to those who may ask hold."""
ROUTES = sorted(path.replace("{model:path}", "manta") for path in ADMIN | USER | NO_ROUTES)
BODY = b'{"prompt": "x", "max_tokens": 1}'
RANDOM_REQUESTS = 1500


@pytest.fixture(
    scope="module", params=["haproxy", pytest.param("python proxy", marks=pytest.mark.full_chaos)]
)
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, entry("user"), entry("admin", role="admin"))
    with manta(
        haproxy=request.param == "haproxy",
        api_keys_file=str(path),
        allowed_hosts=["x"],
        body_timeout_s=2,
    ) as server:
        yield server.port


def refused(port: int, request: bytes) -> int:
    status, answer = ask(port, request)
    assert status in REFUSALS, (request, answer)
    assert KNOWN.search(answer.split(b"\r\n\r\n", 1)[1]) is None, (request, answer)
    return status


def test_every_route_is_refused(port: int) -> None:
    found = {
        refused(port, raw(method, path, host=host, body=b"" if method == "TRACE" else BODY))
        for path, method, host in itertools.product(ROUTES, METHODS, ("x", "elsewhere"))
        if path != "/-/routes"
    }
    assert {401, 421} <= found


@pytest.mark.parametrize("host", [*HOSTS, "x:80", "X", "127.0.0.1", "localhost", "[::1]", "x x"])
def test_no_host_opens_a_route(port: int, host: str) -> None:
    for path in ROUTES:
        if path != "/-/routes":
            refused(port, raw("GET", path, host=host))
            refused(port, raw("POST", path, host=host, body=BODY))


def test_no_spelling_or_header_opens_a_route(port: int) -> None:
    for method, path in itertools.product(METHODS, PATHS):
        refused(port, raw(method, path))
    for header, path in itertools.product(HEADERS, ROUTES):
        if path != "/-/routes":
            refused(port, raw("GET", path, header))


def test_random_combinations(port: int) -> None:
    draw = random.Random(1)
    paths = [path for path in ROUTES if path != "/-/routes"] + list(PATHS)
    for _ in range(RANDOM_REQUESTS):
        path, method, host = draw.choice(paths), draw.choice(METHODS), draw.choice(HOSTS)
        headers = draw.sample(HEADERS, draw.randrange(4))
        body = draw.choice([b"", b"{", BODY, b"\0" * 100, b"x" * 70_000])
        refused(
            port, raw(method, path, *headers, host=host, body=b"" if method == "TRACE" else body)
        )


@pytest.mark.parametrize(
    "request_",
    [
        raw("POST", "/health", "Content-Length: 3", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        raw("POST", "/v1/models", "Content-Length: 3", "Content-Length: 4") + b"abcd",
        raw("POST", "/v1/models", "Transfer-Encoding: x") + b"0\r\n\r\n",
        raw("POST", "/v1/models", "Transfer-Encoding: chunked") + b"zz\r\n\r\n",
        raw("POST", "/v1/models", "Transfer-Encoding: chunked")
        + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        raw("GET", "/v1/models", "Host: y"),
        raw("GET", "/v1/models", "X-Long: " + "a" * 200_000),
        raw("GET", "/v1/models", *(f"X-{number}: 1" for number in range(1000))),
        raw("GET", "/v1/models?" + "a" * 200_000),
        raw("GET", "/v1/models", " X-Folded: 1"),
        raw("GET", "/v1/models", "No colon"),
        raw("GET", "/v1/models", "Authorization : Bearer user"),
        raw("get", "/v1/models"),
        raw("G\x01T", "/v1/models"),
        raw("CONNECT", "x:443"),
        raw("PRI", "*"),
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n",
    ],
)
def test_malformed_requests(port: int, request_: bytes) -> None:
    """A connection may also be cut without an answer."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            connection.sendall(request_)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except OSError as error:
            assert not isinstance(error, TimeoutError)
    statuses = {int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", answer)}
    assert statuses <= REFUSALS | {431}, answer
    assert b"manta_" not in answer and b'"id"' not in answer, answer


def test_what_is_open(port: int) -> None:
    for path in ("/health", "/-/healthz", "/docs/assets/swagger-ui-bundle.js"):
        assert ask(port, raw("GET", path))[0] == 200
    status, answer = ask(port, raw("GET", "/-/routes"))
    assert status in (200, 404) and KNOWN.search(answer.split(b"\r\n\r\n", 1)[1]) is None
    assert ask(port, raw("GET", "/v1/models", "X-Api-Key: user"))[0] == 200
    assert ask(port, raw("GET", "/metrics", "X-Api-Key: admin"))[0] == 200
