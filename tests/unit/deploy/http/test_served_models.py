"""Several models behind one API: each request reaches the one that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.errors import EngineDeadError
from engine.process.folders import FOLDER_VARIABLE
from tests.support.fake_client import FakeEngineClient
from tests.support.loading_client import CALLS, LoadingClient, write_adapter
from tests.support.metrics_text import values


def named(name: str, **fields: Any) -> LoadingClient:
    made = LoadingClient()
    made._info = replace(made._info, name=name, **fields)
    return made


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LoadingClient]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    catalog = AdapterCatalog({"sql": write_adapter(tmp_path / "sql")}, None, 64)
    return [named("big"), named("small", adapters=catalog)]


@pytest.fixture
def http(clients: list[LoadingClient]) -> Iterator[TestClient]:
    with TestClient(build_api(lambda: ServedModels(*clients))) as made:
        yield made


@pytest.mark.parametrize("path", sorted(CALLS.keys() - {"/generate"}))
def test_a_request_reaches_the_model_that_it_names(
    http: TestClient, clients: list[LoadingClient], path: str
) -> None:
    for name, reached in (("small", 1), ("sql", 1), ("big", 0), ("", 0)):
        body = {**CALLS[path], **({"model": name} if name or "messages" in path else {})}
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert [len(client.started) for client in clients] == [1 - reached, reached]
        assert reply.json()["model"] == (name or "big")
        for client in clients:
            client.started.clear()
    reply = http.post(path, json={**CALLS[path], "model": "other"})
    assert reply.status_code == 404
    assert "`big`, `small`, `sql`" in reply.text


def test_generate_names_it_as_an_adapter(http: TestClient, clients: list[LoadingClient]) -> None:
    for lora_path, reached in (("sql", 1), (None, 0)):
        body = {**CALLS["/generate"], **({"lora_path": lora_path} if lora_path else {})}
        assert http.post("/generate", json=body).status_code == 200
        assert len(clients[reached].started) == 1
    assert http.post("/generate", json={**CALLS["/generate"], "lora_path": "x"}).status_code == 404


def test_the_models_page_has_all(http: TestClient) -> None:
    listed = http.get("/v1/models").json()["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in listed] == [
        ("big", "big", None),
        ("small", "small", None),
        ("sql", "small", "small"),
    ]
    assert http.get("/v1/models/sql").json()["parent"] == "small"
    assert http.get("/v1/models/none").status_code == 404


def test_tokens_are_those_of_the_model(http: TestClient, clients: list[LoadingClient]) -> None:
    async def none(*_: Any, **__: Any) -> list[list[int]]:
        return [[]]

    clients[1].encode = none  # type: ignore[method-assign]
    for name, num in (("big", 2), ("small", 0), ("sql", 0), ("", 2)):
        body = {"prompt": "a", **({"model": name} if name else {})}
        assert http.post("/tokenize", json=body).json()["count"] == num


def test_health_of_each(http: TestClient, clients: list[LoadingClient]) -> None:
    found = http.get("/health")
    assert found.status_code == 200
    assert found.json() == {"status": "ok", "models": {"big": "ok", "small": "ok"}}
    clients[1].is_healthy = False
    asyncio.run(asyncio.sleep(0.6))
    found = http.get("/health")
    assert found.status_code == 503
    assert found.json()["detail"].startswith("small: ")
    assert found.json()["models"]["big"] == "ok"
    assert http.get("/health", params={"model": "big"}).json() == {"status": "ok"}
    assert http.get("/health", params={"model": "small"}).status_code == 503
    for unknown in ("sql", "other"):
        found = http.get("/health", params={"model": unknown})
        assert found.status_code == 404
        assert "small" not in found.text, "who has no key may ask"


def test_what_concerns_all(http: TestClient, clients: list[LoadingClient]) -> None:
    assert http.post("/flush_cache").status_code == 200
    assert [client.num_flushes for client in clients] == [1, 1]
    clients[1].refusals = ["replica r: busy"]
    assert "replica r: busy" in http.post("/flush_cache").text
    assert http.get("/health_generate").status_code == 200
    clients[1].is_healthy = False
    assert "small: " in http.get("/health_generate").text
    assert http.get("/health_generate", params={"model": "big"}).status_code == 200
    assert http.get("/health_generate", params={"model": "sql"}).status_code == 503
    assert http.get("/health_generate", params={"model": "other"}).status_code == 404
    status = http.get("/debug/status").json()
    assert [model["model"] for model in status["models"]] == ["big", "small"]
    events = http.get("/debug/trace").json()["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert any("big" in name for name in processes)
    assert any("small" in name for name in processes)


def test_lost_engines_hide_nothing_of_the_others(
    http: TestClient, clients: list[LoadingClient]
) -> None:
    async def lost(*_: Any) -> Any:
        raise EngineDeadError("no replica answers")

    clients[1].trace = clients[1].flush_cache = lost  # type: ignore[method-assign]
    assert "big" in http.get("/debug/trace").text
    reply = http.post("/flush_cache")
    assert reply.status_code == 400
    assert "small: no replica answers" in reply.text
    assert clients[0].num_flushes == 1
    clients[0].trace = lost  # type: ignore[method-assign]
    assert http.get("/debug/trace").status_code == 503


def test_a_folders_name_comes_last(tmp_path: Path, clients: list[LoadingClient]) -> None:
    write_adapter(tmp_path / "folder" / "sql")
    write_adapter(tmp_path / "folder" / "big")
    catalog = AdapterCatalog({}, str(tmp_path / "folder"), 64)
    models = ServedModels(named("before", adapters=catalog), *clients)
    assert models.of("sql") is clients[1]
    assert models.of("big") is clients[0]


def test_information_of_one(http: TestClient) -> None:
    for path in ("/model_info", "/server_info"):
        assert http.get(path).json()["served_model_name"] == "big"
        found = http.get(path, params={"model": "small"}).json()
        assert found["served_model_name"] == "small"
        assert http.get(path, params={"model": "other"}).status_code == 404


def test_metrics_of_each(http: TestClient) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    http.post("/v1/completions", json={**body, "model": "sql"})
    http.post("/v1/completions", json={**body, "model": "other"})
    http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    found = samples(http.get("/metrics").text)
    assert found["manta_requests_total", "small", "200"] == 1
    assert found["manta_requests_total", "", "404"] == 1
    assert found["manta_requests_total", "", "400"] == 1
    assert not [key for key in found if key[0] == "manta_requests_total" and key[1] == "big"]
    assert found["manta_generation_tokens_total", "small", ""] == 2
    assert found["manta_generation_tokens_total", "big", ""] == 0
    assert {model for name, model, _ in found if name == "manta_engine_num_running"} == {
        "big",
        "small",
    }
    in_flight = [value for key, value in found.items() if key[0] == "manta_requests_in_flight"]
    assert in_flight and not any(in_flight)


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """By name, model and status."""
    return {
        (sample.name, sample.labels.get("model_name", ""), sample.labels.get("status", "")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_one_model_has_no_unnamed_metrics() -> None:
    with TestClient(build_api(lambda: ServedModels(FakeEngineClient()))) as http:
        http.post("/v1/completions", json={"prompt": "a", "model": "other"})
        text = http.get("/metrics").text
    assert 'model_name=""' not in text
    assert values(text)['manta_requests_total{endpoint="completions",status="404"}'] == 1


def test_adapters_of_one(http: TestClient, clients: list[LoadingClient], tmp_path: Path) -> None:
    load = {"lora_name": "new", "lora_path": str(tmp_path / "new")}
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert (len(clients[0].calls), len(clients[1].calls)) == (1, 0)
    of_small = {**load, "base_model": "small"}
    assert http.post("/v1/load_lora_adapter", json=of_small).status_code == 200
    assert len(clients[1].calls) == 1
    for wrong, status in (
        (({**load, "base_model": "x"}), 404),
        ({**load, "lora_name": "sql"}, 400),
    ):
        assert http.post("/v1/load_lora_adapter", json=wrong).status_code == status
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
    assert clients[1].calls[-1] == ("sql",)
