"""Finds what a model of transformers keeps in its cache, where its attention is its own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Cache

from engine.checkpoint.layout import AttentionCall
from engine.models.row_cache import tokens_and_cache

NUM_TOKENS = 24
_CAUSAL: Any = AutoModelForCausalLM


class _Recorded(Cache):
    """Notes what layers keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kept: list[tuple[int, Tensor, Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.kept.append((layer_idx, key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def record_gathered(config: Any) -> tuple[list[AttentionCall], set[str]]:
    """The attention of a model that keeps keys and values in its cache, layer by layer, without any
    numbers; [] if it keeps none, or keeps something else. And the modules that are called."""
    called: set[str] = set()
    cache = _Recorded()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model = _CAUSAL.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            ).eval()
            for name, module in model.named_modules():
                module.register_forward_hook(lambda *_, name=name: called.add(name))
            model(**tokens_and_cache(model, cache, NUM_TOKENS, "cpu"))
    except Exception:  # the code of any model; what it lacked before is said instead
        return [], called
    shapes = [(layer, k.shape, v.shape) for layer, k, v in cache.kept]
    in_order = [layer for layer, *_ in shapes] == list(range(len(shapes)))
    whole = all(
        k[:1] == v[:1] == (1,) and k[1:3] == v[1:3] and k[2] == NUM_TOKENS for _, k, v in shapes
    )
    return (_calls(shapes) if in_order and whole else []), called


def _calls(shapes: Sequence[tuple[int, Any, Any]]) -> list[AttentionCall]:
    return [
        AttentionCall(k[1], k[1], k[3], v[3], k[3] ** -0.5, layer=layer, is_gathered=True)
        for layer, k, v in shapes
    ]
