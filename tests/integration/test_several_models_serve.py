"""Two base models and their adapters from one config: each request gets its own, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import yaml

from benchmarks.common import REPO_ROOT
from benchmarks.servers import ManagedServer
from tests.support.adapters import make_adapter
from tests.support.engines import load_reference
from tests.support.families import make_family
from tests.support.http_server import (
    Streamed,
    disturbed_streams,
    ids_of,
    manta,
    metric,
    sampled_body,
    streams,
    wait_idle,
)

SMALL = REPO_ROOT / "models" / "manta-small"
PARENTS = {"manta-small": None, "a": "manta-small", "b": "manta-small", "other": None, "c": "other"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedServer]:
    folder = tmp_path_factory.mktemp("models")
    other = make_family(folder / "other", "granite")
    small = load_reference(SMALL)
    make_adapter(folder / "a", small, rank=4, seed=1, size=0.8)
    make_adapter(folder / "b", small, rank=8, seed=2, size=0.8)
    make_adapter(folder / "c", load_reference(other), rank=4, seed=3, size=0.8)
    args = {
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 16384,
        "models": [
            {
                "model": str(SMALL),
                "lora_adapters": {name: str(folder / name) for name in ("a", "b")},
            },
            {"model": str(other), "lora_adapters": {"c": str(folder / "c")}},
        ],
    }
    app = {"name": "llm", "import_path": "serve_app:build_app", "args": args}
    config = folder / "two.yaml"
    config.write_text(yaml.safe_dump({"applications": [app]}))
    with manta(str(config)) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ManagedServer) -> str:
    return server.base_url


def run(url: str, bodies: list[dict[str, Any]]) -> list[list[int]]:
    return ids_of(asyncio.run(streams(url, bodies)))


def test_the_official_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert {m.id: m.parent for m in client.models.list()} == PARENTS  # type: ignore[attr-defined]
    answers = set()
    for name in PARENTS:
        reply = client.completions.create(model=name, prompt="Say it", temperature=0, max_tokens=9)
        assert reply.model == name
        answers.add(reply.choices[0].text)
    assert len(answers) == 5
    with pytest.raises(openai.NotFoundError, match="`manta-small`, `a`, `b`, `other`, `c`"):
        client.completions.create(model="none", prompt="x")


def test_all_at_once_are_as_alone(url: str) -> None:
    bodies = [sampled_body(name, at, 60) for at, name in enumerate([*PARENTS] * 4)]
    alone = [run(url, [one])[0] for one in bodies]
    assert run(url, bodies) == alone
    wait_idle(url, 30)


def test_the_other_models_streams_go_on(url: str) -> None:
    """One model's worker is killed: its streams are resumed or wait, the other's notice nothing."""
    of_small = [
        sampled_body(name, at, 200) for at, name in enumerate(("manta-small", "a", "b") * 3)
    ]
    of_other = [sampled_body(name, at, 400) for at, name in enumerate(("other", "c") * 3)]
    alone = run(url, of_small), run(url, of_other)
    status = httpx.get(f"{url}/debug/status", timeout=30).json()
    assert [len(model["replicas"]) for model in status["models"]] == [1, 1]
    roles = status["models"][1]["replicas"][0]["roles"]
    (worker,) = [role["pid"] for role in roles if role["role"].startswith("worker")]

    async def both() -> list[list[Streamed]]:
        reading = asyncio.ensure_future(streams(url, of_small))
        other = await disturbed_streams(url, of_other, lambda: os.kill(worker, signal.SIGKILL))
        return [await reading, other]

    small, other = asyncio.run(both())
    assert ids_of(small) == alone[0]
    assert ids_of(other) == alone[1]
    text = httpx.get(f"{url}/metrics", timeout=30).text
    resumed = {
        line.partition("model_name=")[2].split('"')[1]
        for line in text.splitlines()
        if line.startswith("manta_requests_resumed_total{") and not line.endswith(" 0.0")
    }
    assert resumed == {"other"}
    health = httpx.get(f"{url}/health", params={"model": "manta-small"}, timeout=30)
    assert health.status_code == 200


def test_metrics_and_trace_of_each(url: str) -> None:
    run(url, [sampled_body(name, at, 5) for at, name in enumerate(PARENTS)])
    text = httpx.get(f"{url}/metrics", timeout=30).text
    assert text.count("# TYPE manta_engine_num_running ") == 1
    assert 'model_name="other"' in text and 'model_name="manta-small"' in text
    assert metric(url, "manta_generation_tokens_total") > 0
    events = httpx.get(f"{url}/debug/trace", timeout=30).json()["traceEvents"]
    processes = " ".join(e["args"]["name"] for e in events if e["name"] == "process_name")
    assert "manta-small" in processes and "other" in processes
