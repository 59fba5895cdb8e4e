"""Models whose attention is their own code: its keys come from our pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.flashinfer_backend import lack_of_attention
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.support.other_architectures import assert_same_as_transformers, made_when_asked

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
    """Models by name, made when first asked for."""
    with made_when_asked(tmp_path_factory, MODELS) as found:
        yield found


@pytest.mark.parametrize(("name", "page"), [("falcon", 1), ("bloom", 16), ("gptj", 4)])
def test_tokens_and_logprobs_are_those_of_transformers(
    folders: dict[str, Path], name: str, page: int
) -> None:
    assert_same_as_transformers(folders[name], num_distinct=3, page_size=page)


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
