"""An engine whose workers divide a model of transformers, as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import engine_for, greedy_reference, load_reference
from tests.support.models import THROUGH_TRANSFORMERS, make_model

MAX_NEW = 8
PROMPTS = [[5], [7 + 5 * i % 190 for i in range(40)], [3, 4, 100] * 9]


@pytest.mark.parametrize(("name", "split"), [("qwen3_moe", {"tp_size": 2, "pp_size": 2})])
def test_workers_give_the_tokens_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: dict[str, int]
) -> None:
    """With memory sized by the layout, retractions, and stages that resolve their inputs."""
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    arch, keys = THROUGH_TRANSFORMERS[name]
    folder = make_model(tmp_path / name, arch, num_hidden_layers=4, **keys)
    wanted = greedy_reference(load_reference(folder), PROMPTS, MAX_NEW)
    greedy = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(folder, page_size=4, **split) as engine:
        for keys in ({"chunked_prefill_size": 16, "retract_every": 3}, {"enable_overlap": False}):
            assert engine.run(PROMPTS, greedy, **keys) == wanted, keys
