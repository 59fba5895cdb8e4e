"""How many tokens each expert gets, against the router's logits in transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.checkpoint import model_config
from engine.errors import ConfigError
from engine.models.recording import record
from tests.support.engines import load_reference
from tests.support.models import THROUGH_TRANSFORMERS, make_model

PROMPTS = [[7 + 5 * i % 190 for i in range(40)], [3, 4, 100] * 9, [5]]
ONE = SamplingParams(max_tokens=1, temperature=0)
SIZES: dict[str, Any] = {"max_total_tokens": 2048, "cpu_threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    arch, keys = THROUGH_TRANSFORMERS["qwen3_moe"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_config, "read_layout", record)
        yield make_model(tmp_path_factory.mktemp("model"), arch, **keys)


def routed(folder: Path) -> dict[int, list[int]]:
    """By layer: tokens of each expert. Of the last layer only prompts' last tokens are computed."""
    model = load_reference(folder)
    counts = torch.zeros(3, 4, dtype=torch.int64)
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), output_router_logits=True).router_logits
        for layer, rows in enumerate(logits):
            chosen = rows.topk(2, -1).indices[-1 if layer == 2 else 0 :]
            counts[layer] += torch.bincount(chosen.flatten(), minlength=4)
    return dict(enumerate(counts.tolist()))


@pytest.mark.parametrize(
    "split", [{}, {"pp_size": 2}, {"tp_size": 2}, {"tp_size": 2, "ep_size": 1}]
)
def test_every_layers_experts_are_counted(folder: Path, split: dict[str, int]) -> None:
    wanted = routed(folder)
    with LLM(str(folder), enable_expert_metrics=True, **split, **SIZES) as llm:
        llm.generate(PROMPTS, ONE, use_tqdm=False)
        deadline = time.monotonic() + 20
        while (found := llm.expert_tokens()) != wanted:
            assert time.monotonic() < deadline, (found, wanted)
            time.sleep(0.05)


def test_nothing_is_counted_unless_asked(folder: Path) -> None:
    with LLM(str(folder), **SIZES) as llm:
        llm.generate(PROMPTS, ONE, use_tqdm=False)
        assert llm.expert_tokens() == {}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"device": "simulated"}, "needs a device that computes experts"),
        ({"model": "models/manta-small"}, "LlamaForCausalLM, has none that can be counted"),
    ],
)
def test_what_can_not_be_counted_is_refused(folder: Path, keys: dict[str, str], words: str) -> None:
    given = {"model": str(folder), "enable_expert_metrics": True, **keys}
    with pytest.raises(ConfigError, match=words):
        LLM(**given)
