"""A server that speculates says what one says that does not, also when its worker dies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.servers import ManagedServer
from tests.support.http_server import manta
from tests.support.processes import actor_pids, launch_mark
from tests.support.speculative_streams import (
    CODE,
    MAX_TOKENS,
    MODEL,
    PROMPTS,
    fields,
    outputs_without_drafts,
    stream_all,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ManagedServer]:
    config = {"method": "ngram", "num_speculative_tokens": 4, "draft_length": "fixed"}
    with manta(max_total_tokens=16384, dtype="float32", speculative_config=config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ManagedServer) -> Iterator[openai.OpenAI]:
    url = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[str, list[int]]]]:
    return outputs_without_drafts()


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_replies_in_one_piece(client: openai.OpenAI, expected: Any, name: str) -> None:
    for prompt, (text, ids) in zip(PROMPTS, expected[name], strict=True):
        reply = client.completions.create(prompt=prompt, **fields(name))
        choice: Any = reply.choices[0]
        assert (choice.text, choice.token_ids) == (text, ids)
        assert reply.usage is not None and reply.usage.completion_tokens == MAX_TOKENS


def test_streams_also_when_the_worker_dies(server: ManagedServer, expected: Any) -> None:
    url = f"{server.base_url}/v1"
    assert asyncio.run(stream_all(url)) == expected
    (worker,) = actor_pids(launch_mark(server.pid), "WorkerActor")
    assert asyncio.run(stream_all(url, worker)) == expected


def test_a_stop_string_within_a_run(client: openai.OpenAI, expected: Any) -> None:
    text, _ = expected["greedy"][2]
    stop = text[60:66]
    body = fields("greedy")
    reply = client.completions.create(prompt=PROMPTS[2], stop=stop, **body)
    assert reply.choices[0].text == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_prediction(client: openai.OpenAI) -> None:
    ask: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What does os.path.join do?"}],
        "max_tokens": 60,
        "temperature": 0,
        "extra_body": {"min_tokens": 60},
    }
    plain = client.chat.completions.create(**ask)
    text = plain.choices[0].message.content
    assert plain.usage is not None and text
    for content in (text, [{"type": "text", "text": text}]):
        prediction: Any = {"type": "content", "content": content}
        reply = client.chat.completions.create(prediction=prediction, **ask)
        assert reply.choices[0].message.content == text
        details = reply.usage and reply.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens or 0) > 30
        assert (details.rejected_prediction_tokens or 0) < 30
    other: Any = {"type": "content", "content": "something else " * 9}
    reply = client.chat.completions.create(prediction=other, **ask)
    assert reply.choices[0].message.content == text
    details = reply.usage and reply.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens == 0


def test_metrics_and_trace(server: ManagedServer, client: openai.OpenAI) -> None:
    client.completions.create(prompt=CODE, **fields("greedy"))
    metrics = httpx.get(f"{server.base_url}/metrics", timeout=30).text
    values = {
        name: float(value)
        for name, value in re.findall(
            r"^manta_engine_spec_decode_(\w+)_total\{.*\} (\S+)$", metrics, re.M
        )
    }
    assert 0 < values["accepted_tokens"] <= values["draft_tokens"]
    assert 0 < values["drafts"] <= values["draft_tokens"]
    assert 'position="3"' in metrics
    trace = httpx.get(f"{server.base_url}/debug/trace?last=50", timeout=30).json()
    steps = [e["args"] for e in trace["traceEvents"] if "drafted" in e.get("args", {})]
    assert steps and all(0 <= args["accepted"] <= args["drafted"] for args in steps)
