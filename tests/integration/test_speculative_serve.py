"""A server that speculates says what one says that does not, also when its worker dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.servers import ManagedServer
from engine import LLM, SamplingParams
from tests.support.drafters import OUTPUTS
from tests.support.http_server import manta
from tests.support.processes import actor_pids, launch_mark

MODEL = "manta-small"
CODE = (
    "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n\n    def "
)
PROMPTS = ["def main():", "Return the", CODE, "import os\nimport sys\nimport os\nimport"]
MAX_TOKENS = 200


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
    """Text and ids of every prompt without speculation, greedy and sampled."""
    found: dict[str, list[tuple[str, list[int]]]] = {}
    with LLM(f"models/{MODEL}", dtype="float32", max_total_tokens=16384) as llm:
        for name, more in (("greedy", {"temperature": 0.0}), ("sampled", {"seed": 7})):
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **more)  # type: ignore[arg-type]
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found[name] = [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs]
    return found


def fields(name: str) -> dict[str, Any]:
    sampling = {"temperature": 0} if name == "greedy" else {"seed": 7}
    extra = {"ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": extra, **sampling}


async def stream(url: str, prompt: str, name: str) -> tuple[str, list[int]]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        text, ids = "", []
        chunks = await client.completions.create(prompt=prompt, stream=True, **fields(name))
        async for chunk in chunks:
            text += chunk.choices[0].text
            ids += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
        return text, ids


async def stream_all(url: str, worker: int | None = None) -> dict[str, list[tuple[str, list[int]]]]:
    """All prompts at once; after a moment `worker` is killed."""
    streams = {
        name: [asyncio.ensure_future(stream(url, prompt, name)) for prompt in PROMPTS]
        for name in ("greedy", "sampled")
    }
    if worker is not None:
        await asyncio.sleep(0.3)
        assert not all(task.done() for tasks in streams.values() for task in tasks)
        os.kill(worker, signal.SIGKILL)
    return {name: list(await asyncio.gather(*tasks)) for name, tasks in streams.items()}


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


def test_streams_go_on_at_a_replica_that_does_not_draft(
    expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two engines one drafts. Its worker dies, and its streams go on at the other."""
    first = tmp_path / "first"
    monkeypatch.setenv(OUTPUTS, str(first))
    config = {"method": "tests.support.drafters:OnlyTheFirst", "draft_length": "fixed"}
    sizes = {"max_total_tokens": 16384, "num_replicas": 2}
    with manta(dtype="float32", speculative_config=config, **sizes) as running:
        url = f"{running.base_url}/v1"
        worker = int(first.read_text())
        assert len(actor_pids(launch_mark(running.pid), "WorkerActor")) == 2
        assert asyncio.run(stream_all(url)) == expected

        async def many() -> list[dict[str, list[tuple[str, list[int]]]]]:
            return await asyncio.gather(stream_all(url), stream_all(url), stream_all(url, worker))

        assert asyncio.run(many()) == [expected] * 3
        metrics = httpx.get(f"{running.base_url}/metrics", timeout=30).text
        resumed = re.findall(r"^manta_requests_resumed_total{[^}]*} (\S+)", metrics, re.M)
        assert sum(map(float, resumed)) > 0


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
