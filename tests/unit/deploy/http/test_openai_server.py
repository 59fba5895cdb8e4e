"""The HTTP application on a real server: openai's client, and clients that leave or stall."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from engine.errors import EngineDeadError, RequestError
from tests.support.api_calls import COMPLETIONS
from tests.support.fake_client import FakeEngineClient, expected_ids, expected_text
from tests.support.http_application import Server, wait_until
from tests.support.metrics_text import bare
from tests.support.model_info import model_info
from tests.support.raw_http import ask

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": COMPLETIONS,
    "raw_path": COMPLETIONS.encode(),
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "http_version": "1.1",
    "scheme": "http",
    "server": ("test", 80),
    "client": ("test", 1),
    "root_path": "",
}


def post_head(length: int) -> str:
    """Request line and headers of a completion whose body has `length` bytes."""
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )


@pytest.fixture()
def server() -> Iterator[Server]:
    server = Server(FakeEngineClient())
    server.start()
    yield server
    server.stop()


@pytest.fixture()
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_completions(sdk: openai.OpenAI) -> None:
    reply = sdk.completions.create(model="fake", prompt="abc", seed=5, max_tokens=4, logprobs=1)
    assert reply.choices[0].text == expected_text(5, 4)
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.tokens == list(expected_text(5, 4))
    assert reply.usage is not None and reply.usage.total_tokens == 8
    assert reply._request_id == reply.id.removeprefix("cmpl-")
    stream = sdk.completions.create(model="fake", prompt="abc", seed=5, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected_text(5, 4)


def test_openai_client_chat(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        seed=5,
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    texts = [choice.message.content for choice in reply.choices]
    assert texts == [expected_text(5, 4), expected_text(6, 4)]
    assert reply.choices[1].token_ids == expected_ids(6, 4)  # type: ignore[attr-defined]
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        seed=5,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = ["", ""]
    total = 0
    for chunk in stream:
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
        total = chunk.usage.completion_tokens if chunk.usage else total
    assert parts == texts
    assert total == 8


def test_openai_client_gets_the_right_exceptions(server: Server, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model="fake", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4")
    assert [model.id for model in sdk.models.list()] == ["fake"]
    with pytest.raises(openai.APIStatusError) as large:
        sdk.completions.create(model="fake", prompt="x" * 2**21)
    assert large.value.status_code == 413
    server.client.error_at = (0, RequestError("full", status=429))
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="fake", prompt="x", stream=True)
    server.client.error_at = (2, EngineDeadError("gone"))
    with pytest.raises(openai.APIError, match="not available"):
        for _ in sdk.completions.create(model="fake", prompt="x", max_tokens=9, stream=True):
            pass
    server.client.error_at = None
    assert sdk.completions.create(model="fake", prompt="x").choices[0].text


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_at", [None, 0, 3])
def test_a_client_that_leaves_frees_its_sequences(
    server: Server, stream: bool, n: int, hang_at: int | None
) -> None:
    engine = server.client
    engine.step_s, engine.hang_at = 0.02, hang_at
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream, "n": n}).encode()
    head = post_head(len(body))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        if stream and hang_at != 0:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        else:
            wait_until(lambda: engine.open == n)
    wait_until(lambda: len(engine.aborted) == n)
    assert engine.open == 0 and not engine.finished
    url = f"http://127.0.0.1:{server.port}/metrics"
    left = 'manta_requests_total{endpoint="completions",status="499"} 1.0'
    wait_until(lambda: left in bare(httpx.get(url).text))
    assert 'manta_requests_in_flight{endpoint="completions"} 0.0' in bare(httpx.get(url).text)


def test_a_stream_that_nobody_reads_is_given_up(server: Server) -> None:
    engine = server.client
    engine._info = model_info("fake", 10**6, 300)
    body = json.dumps({"prompt": "x", "max_tokens": 200_000, "stream": True}).encode()
    head = post_head(len(body))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + body)
        wait_until(lambda: len(engine.aborted) == 1)
    assert not engine.finished


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_the_handler_frees_its_sequences(stream: bool, n: int) -> None:
    # What Ray Serve does when a client leaves.
    client = FakeEngineClient()
    client.hang_at = 2
    body = json.dumps({"prompt": "x", "max_tokens": 9, "stream": stream, "n": n}).encode()

    async def run() -> None:
        app = build_api(lambda: ServedModels(client))
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in received:
                return message
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        task = asyncio.create_task(app(dict(SCOPE), receive, send))
        await asyncio.sleep(0.05)
        assert client.open == n
        assert bool(sent) == stream
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.open == 0
        assert len(client.aborted) == n
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_receive_that_fails_is_a_client_that_left() -> None:
    # Ray Serve's ASGI receive raises TaskCancelledError then.
    client = FakeEngineClient()
    client.hang_at = 2
    body = json.dumps({"prompt": "x", "max_tokens": 9}).encode()
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        if not client.started:
            return {"type": "http.request", "body": body, "more_body": False}
        raise RuntimeError("cancelled")

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        await build_api(lambda: ServedModels(client))(dict(SCOPE), receive, send)

    asyncio.run(run())
    assert (len(client.aborted), client.open, sent) == (1, 0, [])


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/fake", "/health", "/version", "/metrics", "/openapi.json"]
)
def test_a_slash_at_the_end_changes_nothing(server: Server, path: str) -> None:
    """No redirect: behind TLS it would lead to http://."""
    url = f"http://127.0.0.1:{server.port}"
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    path = path.replace("fake", name)
    plain, slashed = (httpx.get(f"{url}{path}{end}") for end in ("", "/"))
    assert slashed.status_code == plain.status_code == 200
    assert slashed.headers["content-type"] == plain.headers["content-type"]


def test_a_post_with_a_slash_is_answered(server: Server) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
    plain, slashed = (httpx.post(f"{url}{end}", json=body) for end in ("", "/"))
    assert slashed.status_code == plain.status_code == 200
    assert slashed.json().keys() == plain.json().keys()


@pytest.mark.parametrize("path", ["/chat", "/status"])
def test_a_page_with_a_slash_is_found_without_an_address(server: Server, path: str) -> None:
    reply = httpx.get(f"http://127.0.0.1:{server.port}{path}/")
    assert reply.status_code == 307 and reply.headers["location"] == f"..{path}"
    assert httpx.get(reply.url.join(reply.headers["location"])).status_code == 200


def test_a_path_that_is_none_stays_none(server: Server) -> None:
    for path in ("/nothing/", "/health//"):
        reply = httpx.get(f"http://127.0.0.1:{server.port}{path}")
        assert reply.status_code == 404 and "error" in reply.json()


def _ask_1_0(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[bytes, bytes]:
    """Head and body of the answer to a request of HTTP/1.0."""
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{'POST' if body is not None else 'GET'} {path} HTTP/1.0\r\nHost: x\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    _, answer = ask(port, head.encode() + b"\r\n" + data)
    found, _, rest = answer.partition(b"\r\n\r\n")
    return found.lower(), rest


@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_http_1_0_get_no_chunks(server: Server, stream: bool) -> None:
    body = {"prompt": "abc", "seed": 5, "max_tokens": 4, "stream": stream}
    head, text = _ask_1_0(server.port, COMPLETIONS, body)
    assert b" 200 " in head and b"transfer-encoding" not in head
    assert f"content-length: {len(text)}".encode() in head
    if stream:
        events = [line[6:] for line in text.decode().split("\n\n") if line]
        assert events[-1] == "[DONE]"
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == expected_text(5, 4)
    else:
        assert json.loads(text)["choices"][0]["text"] == expected_text(5, 4)


def test_other_replies_to_http_1_0_have_no_chunks_either(server: Server) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/chat", "/debug/trace", "/nothing"):
        head, text = _ask_1_0(server.port, path)
        assert b"transfer-encoding" not in head, path
        assert f"content-length: {len(text)}".encode() in head, path
