"""Traces and logs of a live server: each request is one trace, and nobody's prompt is in either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.servers import ManagedServer
from tests.support.collector import Collector, Span, server_span
from tests.support.http_server import manta, streams

SECRET = "xylophone"
"""In every prompt. The bytes of traces and logs mustn't hold it."""
TRACES = [f"{number:032x}" for number in range(1, 5)]
PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module", params=["text", "json"])
def traced(request: pytest.FixtureRequest) -> Iterator[tuple[ManagedServer, Collector, str]]:
    with (
        Collector() as collector,
        manta(otlp_endpoint=collector.url, log_format=request.param, log_level="DEBUG") as server,
    ):
        yield server, collector, request.param


def complete(url: str, traceparent: str | None, **fields: object) -> int:
    body = {"prompt": f"The {SECRET} is", "max_tokens": 8, "ignore_eos": True, **fields}
    headers = {} if traceparent is None else {"traceparent": traceparent}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code


def test_each_request_is_one_trace(traced: tuple[ManagedServer, Collector, str]) -> None:
    server, collector, log_format = traced
    for trace in TRACES:
        assert complete(server.base_url, f"00-{trace}-{PARENT}-01") == 200
    assert complete(server.base_url, f"00-{'e' * 32}-{PARENT}-00") == 200  # not sampled
    for n in (1, 3):
        assert complete(server.base_url, None, n=n) == 200
    assert complete(server.base_url, None, max_tokens=SECRET) == 400
    body = {"prompt": SECRET, "max_tokens": 300, "ignore_eos": True}
    asyncio.run(streams(server.base_url, [body], cut_after=3))
    found = collector.traces(len(TRACES) + 4)
    assert len(found) == len(TRACES) + 4 and "e" * 32 not in found
    statuses = []
    for trace, spans in found.items():
        root = server_span(spans)
        assert root is not None and root.parent_id == (PARENT if trace in TRACES else "")
        assert all(span.parent_id == root.span_id for span in spans if span is not root)
        assert root.resource["service.name"] == "manta" and root.resource["manta.model"]
        assert root.attributes["http.route"] == "/v1/completions"
        _check_parts(root, spans)
        statuses.append(root.attributes["http.response.status_code"])
    assert sorted(statuses) == [200] * (len(TRACES) + 2) + [400, 499]
    assert not any(SECRET.encode() in body for body in collector.bodies)
    _check_log(server, log_format)


def _check_parts(root: Span, spans: list[Span]) -> None:
    status = root.attributes["http.response.status_code"]
    parts = [span for span in spans if span is not root]
    if status == 400:
        assert parts == []
        return
    num_sequences = len({span.attributes["manta.sequence"] for span in parts})
    assert sorted(span.name for span in parts) == sorted(
        ["queue", "prefill", "decode"] * num_sequences
    )
    if status == 200:
        assert root.attributes["gen_ai.usage.output_tokens"] == 8 * num_sequences
    for sequence in range(num_sequences):
        own = [span for span in parts if span.attributes["manta.sequence"] == sequence]
        queue, prefill, decode = (next(s for s in own if s.name == name)
                                  for name in ("queue", "prefill", "decode"))  # fmt: skip
        assert root.start <= queue.start <= queue.end == prefill.start
        assert prefill.end == decode.start <= decode.end <= root.end
        assert queue.resource == root.resource


def _check_log(server: ManagedServer, log_format: str) -> None:
    log = server.log_tail(100_000)
    assert SECRET not in log
    assert "POST /v1/completions 200" in log.replace("/llm", "")
    ours = [line for line in log.splitlines() if "weights" in line]
    assert ours, "the worker says that it loads the weights"
    texts = [line for line in ours if '{"time": ' not in line]
    if log_format == "text":
        assert texts == ours
        return
    records = [json.loads(line[line.index("{") :]) for line in ours if line not in texts]
    assert records and all(record["logger"].startswith("engine.") for record in records)
