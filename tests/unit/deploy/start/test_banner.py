"""What a start says of the model and its parallel layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.start.banner import describe
from engine.checkpoint import model_config
from engine.config import EngineConfig
from engine.models.recording import record
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
