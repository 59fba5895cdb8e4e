"""Adapters by name in every API, and the routes that load them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.errors import RequestError
from engine.process.folders import FOLDER_VARIABLE
from tests.support.fake_client import FakeEngineClient
from tests.support.loading_client import CALLS, LoadingClient, write_adapter


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadingClient:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    made = LoadingClient()
    listed = {"sql": write_adapter(tmp_path / "sql")}
    write_adapter(tmp_path / "folder" / "tenant")
    catalog = AdapterCatalog(listed, str(tmp_path / "folder"), 64)
    made._info = replace(made._info, adapters=catalog)
    return made


@pytest.fixture
def http(client: LoadingClient) -> Iterator[TestClient]:
    with TestClient(build_api(lambda: ServedModels(client))) as made:
        yield made


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("name", ["sql", "tenant"])
def test_every_api_takes_its_name(
    http: TestClient, client: LoadingClient, path: str, name: str
) -> None:
    field = "lora_path" if path == "/generate" else "model"
    reply = http.post(path, json={**CALLS[path], field: name})
    assert reply.status_code == 200, reply.text
    if field == "model":
        assert reply.json()["model"] == name
    (sequence,) = client.started
    assert sequence.adapter is not None
    assert sequence.adapter.name == name
    assert sequence.namespace == f"{sequence.adapter.digest}\n"
    reply = http.post(path, json={**CALLS[path], field: "nobody"})
    assert reply.status_code == 404
    assert "`sql`" in reply.text and "`tenant`" in reply.text


def test_the_model_itself_has_none(http: TestClient, client: LoadingClient) -> None:
    for more in ({}, {"model": "fake"}):
        assert http.post("/v1/completions", json={"prompt": "a", **more}).json()["model"] == "fake"
    assert all(s.adapter is None and s.namespace == "" for s in client.started)


def test_a_salt_is_inside_an_adapters_namespace(http: TestClient, client: LoadingClient) -> None:
    for model in ("sql", "tenant", "fake"):
        http.post("/v1/completions", json={"prompt": "a", "model": model, "cache_salt": "s"})
    spaces = [sequence.namespace for sequence in client.started]
    # Both have the same content: they may share prefixes.
    assert spaces[0] == spaces[1]
    assert spaces[2] == "s"
    assert spaces[0].endswith("\ns")


def test_models(http: TestClient) -> None:
    listed = http.get("/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in listed] == [
        ("fake", None),
        ("sql", "fake"),
        ("tenant", "fake"),
    ]
    assert http.get("/v1/models/tenant").json()["parent"] == "fake"
    assert http.get("/v1/models/nobody").status_code == 404


def test_an_adapter_that_is_damaged(
    http: TestClient, client: LoadingClient, tmp_path: Path
) -> None:
    (tmp_path / "folder" / "tenant" / "adapter_model.safetensors").write_bytes(b"x")
    reply = http.post("/v1/completions", json={"prompt": "a", "model": "tenant"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "model"
    assert not client.started


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_loading(http: TestClient, client: LoadingClient) -> None:
    body = {"lora_name": "x", "lora_path": "/adapters/x"}
    reply = http.post(LOAD, json=body)
    assert (reply.status_code, "Success" in reply.text) == (200, True)
    client.lacking = ["replica 2: silent"]
    reply = http.post(LOAD, json={**body, "load_inplace": True})
    assert (reply.status_code, "replica 2" in reply.text) == (200, True)
    assert "Success" in http.post(UNLOAD, json={"lora_name": "x", "lora_int_id": 3}).text
    assert client.calls == [("x", "/adapters/x", False), ("x", "/adapters/x", True), ("x",)]
    client.refusal = RequestError("it doesn't fit", "lora_path")
    reply = http.post(LOAD, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("it doesn't fit")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (LOAD, {}, 400),
        (LOAD, {"lora_name": "x"}, 400),
        (LOAD, {"lora_name": "", "lora_path": "/x"}, 400),
        (LOAD, {"lora_name": 5, "lora_path": "/x"}, 400),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "more": 1}, 400),
        (UNLOAD, {}, 400),
    ],
)
def test_bad_bodies(
    http: TestClient, client: LoadingClient, path: str, body: dict[str, Any], status: int
) -> None:
    assert http.post(path, json=body).status_code == status
    assert not client.calls


def test_a_page_of_another_site_loads_nothing(http: TestClient, client: LoadingClient) -> None:
    headers = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    reply = http.post(LOAD, json={"lora_name": "x", "lora_path": "/x"}, headers=headers)
    assert reply.status_code == 403
    assert not client.calls


def test_a_server_that_loads_nothing() -> None:
    with TestClient(build_api(lambda: ServedModels(FakeEngineClient()))) as http:
        for path in (LOAD, UNLOAD):
            more = {"lora_path": "/x"} if path == LOAD else {}
            reply = http.post(path, json={"lora_name": "x", **more})
            assert reply.status_code == 403
