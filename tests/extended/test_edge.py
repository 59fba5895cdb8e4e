"""The edge of a real server: TLS, clients that send slowly, headers that would steer Serve."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.servers import ManagedServer, free_port
from tests.support.certificates import make_certificate
from tests.support.http_server import START_TIMEOUT_S

BODY = {"prompt": "import os", "max_tokens": 4}
HEADER_S = 10
"""As the documentation says."""


@pytest.fixture(
    scope="module", params=["haproxy", pytest.param("python proxy", marks=pytest.mark.full_chaos)]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, str]]:
    """Kind of proxy, port, and the certificate."""
    cert, key = make_certificate(tmp_path_factory.mktemp("tls"))
    port = free_port()
    command = [sys.executable, "-m", "deploy.launch", "configs/llama.yaml", "--port", str(port)]
    command += ["--ssl-certfile", cert, "--ssl-keyfile", key, "--set", "body_timeout_s=2"]
    command += [] if request.param == "haproxy" else ["--no-haproxy"]
    with ManagedServer(
        command, None, port, timeout_s=START_TIMEOUT_S, stop_timeout_s=60.0, certificate=cert
    ):
        yield request.param, port, cert


def client(server: tuple[str, int, str]) -> httpx.Client:
    _, port, cert = server
    context = ssl.create_default_context(cafile=cert)
    return httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=60)


def connect(server: tuple[str, int, str]) -> ssl.SSLSocket:
    _, port, cert = server
    context = ssl.create_default_context(cafile=cert)
    plain = socket.create_connection(("127.0.0.1", port), timeout=60)
    return context.wrap_socket(plain, server_hostname="localhost")


def rest(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except (ConnectionResetError, ssl.SSLError):
        pass  # cut, which some of the cases below are about
    return answer


def test_https_and_nothing_else(server: tuple[str, int, str]) -> None:
    with client(server) as http:
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=BODY).status_code == 200
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    with socket.create_connection(("127.0.0.1", server[1]), timeout=10) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " not in rest(connection)[:20]
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(server[2])
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", server[1]), timeout=10) as plain,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        old.wrap_socket(plain, server_hostname="localhost")


def test_clients_that_send_slowly(server: tuple[str, int, str]) -> None:
    """Half of the headers: 408 from HAProxy. Half of the body: 408 from the application."""
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:5])
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408"), answer
    if server[0] == "haproxy":
        with connect(server) as connection:
            connection.sendall(head)
            begun = time.monotonic()
            answer = rest(connection)
            assert time.monotonic() - begun > HEADER_S / 2, "it has some time"
        assert answer.startswith(b"HTTP/1.1 408"), answer


def test_headers_that_steer_serve_are_removed(server: tuple[str, int, str]) -> None:
    """With a limit of 1 ms, which a client could set in Serve, nothing would be answered."""
    for name, value in (
        ("X-Request-Timeout-Seconds", "0.001"),
        ("X_Request_Timeout_Seconds", "0.001"),
        ("serve_multiplexed_model_id", "other"),
        ("X-Request-Disconnect-Disabled", "?1"),
    ):
        with client(server) as http:
            reply = http.post(
                "/v1/completions", json={**BODY, "max_tokens": 64}, headers={name: value}
            )
        assert reply.status_code == 200, (name, reply.text)
