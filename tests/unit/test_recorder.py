"""What a recording keeps of a client's request, and what it leaves out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from tests.recorded import record
from tests.recorded.recorder import Recorder
from tests.support.answering_client import AnsweringClient, minimal
from tests.support.api_calls import call


def test_ids_dates_places_and_long_texts_are_left_out() -> None:
    recorder = Recorder({"/home/ann/scratch": "/scratch"})
    body = {
        "messages": [
            {"role": "user", "content": "x" * 161},
            {"tool_calls": [{"id": "call_0123456789abcdef", "function": {"arguments": "y" * 200}}]},
            {"tool_call_id": "call_0123456789abcdef", "content": "in /home/ann/scratch/a.py"},
        ],
        "tools": [{"name": "call_someone", "description": "Since 2026-11-26T01:02:03Z."}],
        "user": "7f3c1e52-6f0b-4c58-9d5e-2f1f6a0e3b11 http://127.0.0.1:4711/v1",
        "client_metadata": {"b": "1", "a": "2"},
    }
    kept = recorder.without_traces(body)
    assert kept == {
        "messages": [
            {"role": "user", "content": "x" * 40 + "... (161 characters)"},
            {"tool_calls": [{"id": "call_1", "function": {"arguments": "y" * 200}}]},
            {"tool_call_id": "call_1", "content": "in /scratch/a.py"},
        ],
        "tools": [{"name": "call_someone", "description": "Since 2000-01-01."}],
        "user": "ID http://server/v1",
        "client_metadata": {"a": "2", "b": "1"},
    }
    assert list(kept["client_metadata"]) == ["a", "b"]
    assert recorder.without_traces(kept) == kept


def test_nothing_is_left_to_be_taken_out_of_the_recordings() -> None:
    files = list(record.BODIES.glob("*.json"))
    assert files
    for file in files:
        recording = json.loads(file.read_text())
        for request in recording["requests"]:
            body = request.get("body")
            assert Recorder({}).without_traces(body) == body, file.name


def test_the_layer_keeps_what_came_once_and_names_what_failed() -> None:
    recorder = Recorder({})
    client = AnsweringClient()

    async def run() -> None:
        app = recorder(build_api(lambda: ServedModels(client)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for body in ({"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "frobnicate": 1}):
                headers = {"Authorization": "Bearer secret", "anthropic-version": "2023-06-01"}
                await http.post("/v1/completions?a=b", json=body, headers=headers)

    asyncio.run(run())
    good, bad = recorder.requests
    assert good == {
        "method": "POST",
        "path": "/v1/completions?a=b",
        "headers": {
            "accept": "*/*",
            "anthropic-version": "2023-06-01",
            "content-type": "application/json",
        },
        "status": 200,
        "body": {"prompt": "a"},
    }
    assert bad["status"] == 400
    (failure,) = recorder.failures
    assert failure.startswith("POST /v1/completions?a=b: 400") and "frobnicate" in failure


def test_a_conversation_is_led_through_a_call_to_a_text() -> None:
    parameters = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    parameters["$defs"] = {"n": {"type": "array", "items": {"enum": ["a"]}, "minItems": 2}}
    assert minimal(parameters) == {"n": ["a", "a"]}
    function = {"name": "f", "parameters": parameters}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    path = "/v1/chat/completions"
    first = call(AnsweringClient(), "POST", path, json=body).json()["choices"][0]
    (made,) = first["message"]["tool_calls"]
    assert first["finish_reason"] == "tool_calls"
    assert json.loads(made["function"]["arguments"]) == {"n": ["a", "a"]}
    result = {"role": "tool", "tool_call_id": made["id"], "content": "1"}
    body["messages"] = [*body["messages"], first["message"], result]
    second = call(AnsweringClient(), "POST", path, json=body).json()["choices"][0]
    assert second["finish_reason"] == "stop" and "Paris" in second["message"]["content"]


def test_a_client_that_fails_is_named_at_the_end_and_the_others_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(client: record.Client) -> str:
        if client.name == "llm":
            raise RuntimeError("no such package")
        return "1.0"

    monkeypatch.setattr(record, "install", install)
    monkeypatch.setattr(record, "requests_of", lambda client: [{"path": "/v1/models"}])
    monkeypatch.setattr(record, "BODIES", tmp_path)
    monkeypatch.setattr("sys.argv", ["record", "llm", "aider"])
    assert record.main() == 1
    assert "llm failed: no such package" in capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    recording = json.loads(file.read_text())
    wanted = {"client": "aider", "version": "1.0", "requests": [{"path": "/v1/models"}]}
    assert recording == wanted
    monkeypatch.setattr("sys.argv", ["record", "aider"])
    assert record.main() == 0


def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    # Whoever lives on holds the pipes, and then this would wait for it.
    with pytest.raises(RuntimeError, match="took more than"):
        record.run(["bash", "-c", "sleep 600 & wait"], tmp_path, 1)
