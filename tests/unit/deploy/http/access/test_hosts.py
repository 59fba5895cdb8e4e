"""`Host` and `Origin`."""

from __future__ import annotations

import socket

import pytest

from deploy.http.access.hosts import host_name, own_hosts
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.api_calls import call
from tests.support.fake_client import FakeEngineClient

CONFIGURED = ApiSettings(ServerOptions(allowed_hosts=["api.example.com", "*.models.example.com"]))
LOCAL = ApiSettings(is_local=True)


def status(settings: ApiSettings, **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    client = FakeEngineClient()
    return call(client, "GET", "/v1/models", headers=given, api_settings=settings).status_code


@pytest.mark.parametrize(
    "host",
    [
        "api.example.com", "API.example.com:8000", "api.example.com.", "a.models.example.com",
        "localhost:8000", "127.0.0.1", "[::1]:8000", socket.gethostname(), *sorted(own_hosts()),
    ],
)  # fmt: skip
def test_allowed(host: str) -> None:
    host = f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
    assert status(CONFIGURED, host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "example.com", "models.example.com", "api.example.com.evil.example",
        "api.example.com@evil.example", "evil.example/api.example.com", "localhost.evil.example",
        "api.example.com:x", "[::1", "[evil]", "", "127.0.0.1.evil.example", "localhost:80:80",
    ],
)  # fmt: skip
def test_refused(host: str) -> None:
    reply = call(
        FakeEngineClient(), "POST", "/v1/messages", headers={"host": host}, json={},
        api_settings=CONFIGURED,
    )  # fmt: skip
    assert reply.status_code == 421
    assert reply.json()["type"] == "error" and "allowed_hosts" in reply.json()["error"]["message"]


def test_pages_that_rebind_their_name() -> None:
    """By default, programs may name any host, and pages in a browser only this machine."""
    assert status(LOCAL, host="anything") == 200
    assert status(LOCAL, host="evil.example:8000", origin="http://evil.example:8000") == 421
    assert status(LOCAL, host="evil.example:8000", sec_fetch_site="same-origin") == 421
    assert status(LOCAL, host="localhost:8000", origin="http://localhost:8000") == 200
    assert status(ApiSettings(), host="evil.example", origin="http://evil.example") == 200


@pytest.mark.parametrize(
    ("value", "name"),
    [(b"A.b:80", "a.b"), (b"[::0001]:80", "::1"), (b"a:b", ""), (b"[::1]x", ""), (b"\xff", "ÿ")],
)
def test_names(value: bytes, name: str) -> None:
    assert host_name(value) == name


def test_cors() -> None:
    settings = ApiSettings(ServerOptions(cors_origins=["https://chat.example.com"]))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    for origin, fine in (("https://chat.example.com", True), ("https://evil.example", False)):
        headers = {"origin": origin, **ask}
        reply = call(FakeEngineClient(), "OPTIONS", "/v1/models", headers=headers,
                     api_settings=settings)  # fmt: skip
        assert (reply.status_code == 200) == fine
        assert ("access-control-allow-origin" in reply.headers) == fine
        reply = call(FakeEngineClient(), "GET", "/v1/models", headers={"origin": origin},
                     api_settings=settings)  # fmt: skip
        assert reply.status_code == 200
        assert ("access-control-allow-origin" in reply.headers) == fine
    reply = call(
        FakeEngineClient(), "OPTIONS", "/v1/models", headers={"origin": "https://x", **ask}
    )
    assert reply.status_code == 405 and "access-control-allow-origin" not in reply.headers
