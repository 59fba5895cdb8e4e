"""What a start says of the model and its parallel layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.start.banner import describe
from deploy.start.target import load_target
from engine.checkpoint import model_config
from engine.config import EngineConfig
from engine.models.recording import record
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.models import THROUGH_TRANSFORMERS, make_model


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "tp 1 pp 1, device"),
        ({"tp_size": 2}, "tp 2 pp 1 ep 2, device"),
        ({"tp_size": 4, "ep_size": 2}, "tp 4 pp 1 ep 2, device"),
    ],
)
def test_it_names_the_groups_that_divide_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(model_config, "read_layout", record)
    arch, sizes = THROUGH_TRANSFORMERS["mixtral"]
    engine = EngineConfig(model=str(make_model(tmp_path, arch, **sizes)), **keys)
    app = SimpleNamespace(engine=engine, resolved=engine.resolve(), model_name="m", max_replicas=1)
    assert words in describe(app)


def test_a_map_of_experts_is_found_by_processes_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "read_layout", record)
    arch, sizes = THROUGH_TRANSFORMERS["mixtral"]
    folder = make_model(tmp_path / "model", arch, **sizes)
    (tmp_path / "map.json").write_text('{"layers": {"1": [[3, 0], [2, 1]]}}')
    monkeypatch.chdir(tmp_path)
    (app,) = load_target(str(folder), ["tp_size=2", "expert_map=map.json"]).applications
    assert app.engine.expert_map == str(tmp_path / "map.json")
    layout = app.resolved.model.layout
    assert layout is not None and layout.mixtures[1].order == (3, 0, 2, 1)


def test_it_names_the_gguf_file_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_folders_in(tmp_path / "made", monkeypatch)
    made = make_model(tmp_path / "model", "LlamaForCausalLM", intermediate_size=64)
    write_gguf(tmp_path / "model.gguf", made)
    engine = EngineConfig(model=str(tmp_path / "model.gguf"))
    app = SimpleNamespace(engine=engine, resolved=engine.resolve(), model_name="m", max_replicas=1)
    assert f"from {tmp_path / 'model.gguf'}, tp 1" in describe(app)
