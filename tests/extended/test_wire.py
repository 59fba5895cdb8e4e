"""What a listener on the network sees of an engine whose processes are on different nodes.

They aren't here: the faster way between processes of one node (`engine.protocol.local_socket`) is
switched off in all of the server's processes, so that every message goes over TCP. Requests also
travel in Ray's calls, from the ingress to the engine; Ray encrypts them if it is told to.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
import ray.util

from benchmarks.common import REPO_ROOT
from tests.support.certificates import make_certificate
from tests.support.http_server import manta
from tests.support.packets import LoopbackCapture
from tests.support.processes import launch_mark, listening_ports

PROMPT = "The quick zebra xylophone jumped over forty-two lazy documentation strings."
SECRET = b"xylophone"
ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f"
"""The first bytes of a ZeroMQ connection."""
HTTP = (b"POST /", b"GET /", b"HTTP/1.1")
RAY_CALL = b"PRI * HTTP/2.0"

TCP_ONLY = """
from engine.protocol import local_socket
local_socket.MAX_BYTES = -1
"""
NOT_ENCRYPTED = """
import zmq
set_attribute = zmq.Socket.__setattr__
def without_curve(socket, name, value):
    if not name.startswith("curve_"):
        set_attribute(socket, name, value)
zmq.Socket.__setattr__ = without_curve
"""


@pytest.fixture
def capture() -> LoopbackCapture:
    try:
        with LoopbackCapture():
            pass
    except PermissionError:
        pytest.skip("listening on a network device takes CAP_NET_RAW")
    return LoopbackCapture()


@pytest.fixture
def ray_tls(tmp_path: Path) -> dict[str, str]:
    """Environment variables as docs/security.md names them."""
    addresses = ("127.0.0.1", ray.util.get_node_ip_address())
    certificate, key = make_certificate(tmp_path, addresses=addresses)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": certificate,
        "RAY_TLS_SERVER_KEY": key,
        "RAY_TLS_CA_CERT": certificate,
    }


@pytest.mark.optional_tool
@pytest.mark.parametrize("encrypted", [True, False])
def test_messages_over_tcp_hide_prompts(
    encrypted: bool,
    capture: LoopbackCapture,
    ray_tls: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without CURVE and TLS, the same search finds the prompt, as text and as tokens."""
    patches = TCP_ONLY if encrypted else TCP_ONLY + NOT_ENCRYPTED
    (tmp_path / "sitecustomize.py").write_text(patches)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO_ROOT}")
    for name, value in ray_tls.items() if encrypted else ():
        monkeypatch.setenv(name, value)
    with capture, manta(tp_size=2) as server:
        tokens = _complete(server.base_url)
        ports = listening_ports(launch_mark(server.pid))
    flows = capture.flows(ports)
    messages = [flow for flow in flows if flow.startswith(ZMTP)]
    mechanism = b"CURVE" if encrypted else b"NULL"
    assert all(flow[12:32].rstrip(b"\0") == mechanism for flow in messages)
    assert sum(map(len, messages)) > 10_000
    with_text = [flow for flow in flows if SECRET in flow]
    with_tokens = [flow for flow in flows if any(part in flow for part in tokens)]
    if encrypted:
        assert with_text and all(flow.startswith(HTTP) for flow in with_text)
        assert with_tokens == []
    else:
        assert any(flow.startswith(ZMTP) for flow in with_text)
        assert {flow[: len(RAY_CALL)] == RAY_CALL for flow in with_tokens} == {True, False}
        assert all(flow.startswith((ZMTP, RAY_CALL)) for flow in with_tokens)


def _complete(url: str) -> list[bytes]:
    """Send the prompt a few times; its last tokens as arrays hold them."""
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    for _ in range(3):
        completion = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert completion.json()["usage"]["completion_tokens"] == 8
    reply = httpx.post(f"{url}/tokenize", json={"prompt": PROMPT}, timeout=60).json()
    return [np.array(reply["tokens"][-8:], dtype).tobytes() for dtype in (np.int32, np.int64)]
