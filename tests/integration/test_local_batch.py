"""`manta batch`: a file of requests, answered in this process by the small model."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.http.batches import run as batch_run
from deploy.local import local_batch
from deploy.start.cli import main
from engine.errors import EngineDeadError

MODEL = "models/manta-small"
CHAT = "/v1/chat/completions"


def line(number: int) -> dict[str, Any]:
    """As in the example of vLLM's `run-batch`, of several endpoints."""
    body: dict[str, Any] = {
        "model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": f"Hello world {number}!"},
        ],
        "max_completion_tokens": 12,
    }
    url = CHAT
    match number % 5:
        case 1:
            body |= {"temperature": 1.3, "n": 2, "logprobs": True}
        case 2:
            body["response_format"] = {"type": "json_object"}
            body["max_completion_tokens"] = 400
        case 3:
            url = "/v1/embeddings"
            body = {"model": body["model"], "input": ["one", f"two {number}"]}
        case 4:
            url = "/v1/completions"
            body = {"model": body["model"], "prompt": f"{number}", "max_tokens": 5, "stop": ["e"]}
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_run, "FLUSH_S", 0.05)
    monkeypatch.setattr(local_batch.time, "time", lambda: 1_700_000_000)
    many = [line(number) for number in range(100)]
    given = write(tmp_path / "in.jsonl", *many)
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    assert main(["batch", given, "-o", str(whole), "--model", MODEL]) == 0
    assert "100 lines answered" in capsys.readouterr().err
    found = [json.loads(text) for text in whole.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in many]
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in found)
    chat = found[0]["response"]["body"]
    assert chat["model"] == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert json.loads(found[2]["response"]["body"]["choices"][0]["message"]["content"]) is not None
    assert len(found[3]["response"]["body"]["data"]) == 2

    asked = local_batch.LineAsker.ask
    count = 0

    async def dies(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 60:
            raise EngineDeadError("lost")
        return await asked(*args)

    monkeypatch.setattr(local_batch.LineAsker, "ask", dies)
    monkeypatch.setattr(local_batch, "width_of", one_at_a_time)
    assert main(["batch", given, "-o", str(stopped), "--model", MODEL]) == 1
    assert "error: lost; the same command goes on" in capsys.readouterr().err
    assert not stopped.exists()
    monkeypatch.setattr(local_batch.LineAsker, "ask", asked)
    assert main(["batch", given, "-o", str(stopped), "--model", MODEL]) == 0
    assert stopped.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.parts"))


async def one_at_a_time(*_: Any) -> int:
    return 8


def test_lines_that_fail_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**line(0), "custom_id": "wrong", "body": {**line(0)["body"], "max_tokens": -1}}
    given, out = write(tmp_path / "in.jsonl", line(0), wrong), tmp_path / "out.jsonl"
    assert main(["batch", given, "-o", str(out), "--model", MODEL]) == 1
    assert "1 lines answered, 1 failed" in capsys.readouterr().err
    _, second = [json.loads(text) for text in out.read_text().splitlines()]
    assert second["response"]["status_code"] == 400


def test_what_cant_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def refused(*arguments: str, model: str = MODEL) -> str:
        assert main(["batch", *arguments, "-o", str(out), "--model", model]) == 2
        assert not out.exists()
        return capsys.readouterr().err

    assert "can't be read" in refused(str(given))
    write(given, line(0), line(0))
    assert "line 2: Line 1 has the same custom_id." in refused(str(given))
    write(given, {**line(0), "url": "/v1/images"})
    assert "url must be /score, /v1/chat/completions" in refused(str(given))
    write(given, line(0))
    assert "served_model_name" in refused(str(given), model="configs/llama.yaml")
    parts = tmp_path / "out.jsonl.parts"
    parts.mkdir()
    begun = local_batch.Begun("0" * 64, "", 0)
    (parts / "begun.json").write_bytes(local_batch.msgspec.json.encode(begun))
    assert "begun with another input" in refused(str(given))
    (parts / "begun.json").write_bytes(b"")
    assert "begun.json' can't be read" in refused(str(given))
    (parts / "begun.json").unlink()
    (parts / "a part").touch()
    assert "begun.json' can't be read" in refused(str(given))
    with (parts / local_batch.LOCK).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another command writes" in refused(str(given))
