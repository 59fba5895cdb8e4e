"""Models whose attention is their own code: its keys come from our pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.attention.flashinfer_backend import lack_of_attention
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import engine_for, greedy_reference, load_reference
from tests.support.models import make_model

MAX_NEW = 10
GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=2)
SHARED = [7 + 5 * i % 190 for i in range(40)]
PROMPTS = [[5], [*SHARED, 9, 8, 3], SHARED + list(range(20, 60)), SHARED[:33], [3, 4] * 9]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconForCausalLM", {"new_decoder_architecture": False, "multi_query": True}),
    "bloom": ("BloomForCausalLM", {"n_head": 4, "n_layer": 3}),
    "gptj": (
        "GPTJForCausalLM",
        {"n_head": 4, "n_layer": 3, "n_embd": 32, "n_positions": 512, "rotary_dim": 4},
    ),
}
"""Shared keys, biases by distance, and rotations of a kind of their own."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models by name; layouts are recorded in this process."""
    transformers.utils.logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        yield {
            name: make_model(tmp_path_factory.mktemp(name), arch, **keys)
            for name, (arch, keys) in MODELS.items()
        }


@pytest.mark.parametrize(("name", "page"), [("falcon", 1), ("bloom", 16), ("gptj", 4)])
def test_tokens_and_logprobs_are_those_of_transformers(
    folders: dict[str, Path], name: str, page: int
) -> None:
    model = load_reference(folders[name])
    expected = greedy_reference(model, PROMPTS, MAX_NEW)
    assert len({tuple(tokens) for tokens in expected}) >= 3
    with engine_for(folders[name], page_size=page) as engine:
        for keys in (
            {"chunked_prefill_size": -1},
            {"chunked_prefill_size": 16, "warm": [SHARED]},
            {"chunked_prefill_size": 16, "retract_every": 3, "enable_overlap": False},
        ):
            assert engine.run(PROMPTS, GREEDY, **keys) == expected, keys
        found = engine.logprobs
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        mine = torch.tensor([entry.logprob for entry in found[number]])
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=0)


def test_what_is_recorded(folders: dict[str, Path]) -> None:
    config = ModelConfig.from_pretrained(folders["falcon"])
    assert config.layout is not None and config.layout.mode == "gathered"
    assert [(call.num_kv_heads, call.k_dim, call.layer) for call in config.calls] == [
        (1, 8, layer) for layer in range(3)
    ]
    lack = lack_of_attention(torch.bfloat16, config.calls)
    assert "attention of the model's own code" in lack
    for sizes in ({"tp_size": 2}, {"pp_size": 2}):
        with pytest.raises(ConfigError, match="be divided"):
            EngineConfig(model=str(folders["falcon"]), **sizes).resolve()
