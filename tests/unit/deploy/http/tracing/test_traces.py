"""Spans of requests: which there are, whose children they are, what they say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from deploy.http.settings import ApiSettings
from deploy.http.tracing import provider as provider_module
from deploy.http.tracing.layer import parent_of
from deploy.http.tracing.options import TracingOptions
from deploy.options import ServerOptions
from engine.errors import RequestError
from tests.support.api_calls import CHAT, COMPLETIONS, USER, call
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.fake_client import FakeEngineClient
from tests.support.http_application import Server, wait_until

SETTINGS = ApiSettings(tracing=TracingOptions("http://127.0.0.1:9", "fake"))
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """What was exported."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))

    def all(self) -> list[ReadableSpan]:
        return list(self._memory.get_finished_spans())

    def root(self) -> ReadableSpan:
        (root,) = [span for span in self.all() if (span.name or "").startswith("POST")]
        return root

    def children(self) -> list[ReadableSpan]:
        return [span for span in self.all() if span is not self.root()]


class FakeTracing:
    def __init__(self, spans: Spans) -> None:
        self.provider = spans.provider


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    found = Spans()
    monkeypatch.setattr(provider_module, "Tracing", lambda _: FakeTracing(found))
    yield found
    found.provider.shutdown()


def post(
    client: FakeEngineClient, path: str, settings: ApiSettings = SETTINGS, **options: Any
) -> httpx.Response:
    return call(client, "POST", path, api_settings=settings, **options)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_trace(spans: Spans, stream: bool, n: int) -> None:
    client, prompt = FakeEngineClient(), "a secret prompt"
    body = {"prompt": prompt, "max_tokens": 5, "n": n, "stream": stream, "seed": 3}
    reply = post(client, COMPLETIONS, json=body, headers={"x-request-id": "r-1"})
    assert reply.status_code == 200
    root = spans.root()
    assert root.name == f"POST {COMPLETIONS}" and root.parent is None
    num_prompt = len(client.started[0].prompt_ids)
    wanted = {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "gen_ai.request.model": "fake",
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 5 * n,
        "manta.request_id": "r-1",
    }
    assert attributes(root) == wanted
    by_sequence: dict[int, list[ReadableSpan]] = {}
    for span in spans.children():
        assert span.parent is not None and span.context is not None and root.context is not None
        assert span.parent.span_id == root.context.span_id
        assert span.context.trace_id == root.context.trace_id
        by_sequence.setdefault(attributes(span)["manta.sequence"], []).append(span)
    assert sorted(by_sequence) == list(range(n))
    for parts in by_sequence.values():
        assert [span.name for span in parts] == ["queue", "prefill", "decode"]
        times = [at or 0 for span in parts for at in (span.start_time, span.end_time)]
        assert times == sorted(times), "each begins when the one before has ended"
        assert (root.start_time or 0) <= times[0] and times[-1] <= (root.end_time or 0)
        assert attributes(parts[2])["gen_ai.usage.output_tokens"] == 5
    written = "".join(span.to_json() for span in spans.all())
    assert prompt not in written and "secret" not in written


def test_the_time_in_the_queue(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    client, queued_s = FakeEngineClient(), 0.03
    client.step_s = 0.05
    make = client._delta

    def delayed(*args: Any, **options: Any) -> Any:
        delta = make(*args, **options)
        delta.queue_s = queued_s
        return delta

    monkeypatch.setattr(client, "_delta", delayed)
    post(client, COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    queue = next(span for span in spans.children() if span.name == "queue")
    assert (queue.end_time or 0) - (queue.start_time or 0) == pytest.approx(3e7, abs=2)


@pytest.mark.parametrize("sampled", [True, False])
def test_the_clients_trace(spans: Spans, sampled: bool) -> None:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-{'01' if sampled else '00'}"}
    body = {"messages": [USER], "max_tokens": 2}
    assert post(FakeEngineClient(), CHAT, json=body, headers=header).status_code == 200
    if not sampled:
        assert spans.all() == []
        return
    root = spans.root()
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT
    for span in spans.all():
        assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize(
    "header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
)
def test_a_bad_parent_is_none(spans: Spans, header: str) -> None:
    post(FakeEngineClient(), CHAT, json={"messages": [USER]}, headers={"traceparent": header})
    assert spans.root().parent is None


def test_two_parents_are_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
    assert get_current_span(parent_of([header])).get_span_context().is_valid
    assert not get_current_span(parent_of([header, header])).get_span_context().is_valid


@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate", b"x"]), st.binary())))
def test_any_headers_can_be_read(headers: list[tuple[bytes, bytes]]) -> None:
    assert not get_current_span(parent_of(headers)).get_span_context().is_valid


def test_refused_requests(spans: Spans) -> None:
    post(FakeEngineClient(), COMPLETIONS, json={"prompt": "x", "max_tokens": "secret"})
    assert attributes(spans.root())["http.response.status_code"] == 400
    assert spans.root().status.status_code is StatusCode.UNSET and spans.children() == []
    assert "secret" not in spans.root().to_json()


def test_paths_that_clients_invent_are_not_named(spans: Spans) -> None:
    assert post(FakeEngineClient(), "/v1/secret", json={}).status_code == 404
    assert spans.root().name == "POST" and "secret" not in spans.root().to_json()


def test_a_route_that_generates_nothing(spans: Spans) -> None:
    assert post(FakeEngineClient(), "/tokenize", json={"prompt": "x"}).status_code == 200
    assert spans.root().name == "POST /tokenize" and spans.children() == []


def test_an_embedding_has_no_decode(spans: Spans) -> None:
    assert post(FakeEngineClient(), "/v1/embeddings", json={"input": "x"}).status_code == 200
    assert [span.name for span in spans.children()] == ["queue", "prefill"]


def test_a_prompt_alone_is_prefilled(spans: Spans) -> None:
    """One token is computed with it and dropped."""
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "seed": 5}
    assert post(FakeEngineClient(), COMPLETIONS, json=body).status_code == 200
    assert [span.name for span in spans.children()] == ["queue", "prefill", "decode"]
    assert attributes(spans.root())["gen_ai.usage.output_tokens"] == 0


def test_gets_are_not_traced(spans: Spans) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert call(FakeEngineClient(), "GET", path, api_settings=SETTINGS).status_code == 200
    assert spans.all() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_a_failure(spans: Spans, stream: bool, at: int) -> None:
    client = FakeEngineClient()
    client.error_at = (at, RequestError("a secret", status=503))
    post(client, COMPLETIONS, json={"prompt": "x", "max_tokens": 4, "stream": stream})
    root = spans.root()
    assert attributes(root)["http.response.status_code"] == 503
    assert root.status.status_code is StatusCode.ERROR and "secret" not in root.to_json()
    names = [span.name for span in spans.children()]
    assert names == ([] if at == 0 else ["queue", "prefill", "decode"])


@pytest.mark.parametrize("sent", ["alice", "somebody"])
def test_keys(spans: Spans, tmp_path: Path, sent: str) -> None:
    path = write_keys(tmp_path / "keys.yaml", entry("alice"))
    settings = replace(SETTINGS, server=ServerOptions(api_keys_file=str(path)))
    body = {"messages": [USER], "max_tokens": 2}
    reply = post(FakeEngineClient(), CHAT, settings, json=body, headers=bearer(sent))
    known = sent == "alice"
    assert reply.status_code == (200 if known else 401)
    found = attributes(spans.root())
    assert found["http.response.status_code"] == reply.status_code
    assert found.get("manta.key") == ("alice" if known else None)
    assert "somebody" not in spans.root().to_json()


def test_a_client_that_leaves(spans: Spans) -> None:
    client = FakeEngineClient()
    client.hang_at = 2
    server = Server(client, SETTINGS)
    server.start()

    async def leave() -> None:
        url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
        body = {"prompt": "x", "max_tokens": 5, "stream": True}
        async with (
            httpx.AsyncClient() as http,
            http.stream("POST", url, content=json.dumps(body),
                        headers={"content-type": "application/json"}) as reply,
        ):  # fmt: skip
            async for _ in reply.aiter_bytes():
                return

    try:
        asyncio.run(leave())
        wait_until(lambda: bool(spans.all()) and (spans.all()[-1].name or "").startswith("POST"))
    finally:
        server.stop()
    assert attributes(spans.root())["http.response.status_code"] == 499
    assert attributes(spans.root())["error.type"] == "499"
    assert spans.root().status.status_code is StatusCode.UNSET
    decode = next(span for span in spans.children() if span.name == "decode")
    assert decode.end_time == spans.root().end_time
