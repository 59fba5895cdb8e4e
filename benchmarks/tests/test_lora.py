"""The benchmarks of adapters run, and say what they measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import lora, lora_queue, lora_routing
from benchmarks.common import REPO_ROOT
from engine.process.folders import FOLDER_VARIABLE

pytestmark = pytest.mark.usefixtures("own_threads")


def rows_of(
    module: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> list[dict[str, Any]]:
    monkeypatch.setattr(module, "finish", lambda figures, ok: print(json.dumps(figures)))
    module.main(words)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def test_steps(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    assert FOLDER_VARIABLE == "MANTA_CACHE_DIR"
    model = str(REPO_ROOT / "models" / "manta-small")
    words = ["--model", model, "--rounds", "1", "--rows", "8", "--rank", "4"]
    rows = rows_of(lora, words, monkeypatch, capsys)
    assert [row["adapters"] for row in rows] == [0, 1, 8]
    assert all(row["ratio"] > 0 for row in rows)


def test_waits(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    rows = rows_of(lora_queue, ["--requests", "80", "--rates", "1,30"], monkeypatch, capsys)
    assert [(row["arrivals"], row["rate"]) for row in rows] == [
        ("uniform", 1.0),
        ("uniform", 30.0),
        ("zipf", 1.0),
        ("zipf", 30.0),
    ]
    assert rows[0]["within"] == 1.0
    assert rows[1]["p99_ms"] > rows[1]["p99_free_ms"]


def test_routing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ["--rates", "20", "--seeds", "1", "--window", "3"]
    (row,) = rows_of(lora_routing, words, monkeypatch, capsys)
    assert 0 < row["loads"] < row["their_loads"]
    assert row["hit_rate"] > 0
