"""Finds the states that a model of transformers keeps of requests: one forward on `meta`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.checkpoint.layout import StateSpec
from engine.errors import ConfigError
from engine.models.interfaces import point_at
from engine.models.row_cache import tokens_and_cache

NUM_TOKENS = 24
_NAME = "manta_state_recording"
_STATEFUL = frozenset(("conv", "linear_attention", "hybrid", "hybrid_sliding"))
"""Words of `layer_types` whose cache holds states."""


def record_states(model: Any) -> tuple[StateSpec, ...]:
    """What the layers of a model on `meta` leave in transformers' cache beside keys and values. The
    model is changed and must not be used afterwards. Raises `ConfigError`."""
    text = model.config.get_text_config(decoder=True)
    if _STATEFUL.isdisjoint(getattr(text, "layer_types", None) or ()):
        return ()
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    ALL_EXPERTS_FUNCTIONS.register(_NAME, lambda module, hidden, *more: torch.zeros_like(hidden))
    point_at(model, _NAME)
    # States that don't follow the model's type are float32 in a model of another one.
    cache = _fill(model.to(torch.bfloat16))
    found: list[StateSpec] = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
            found += [
                _spec(number, index, kind, state)
                for kind, states in kinds.items()
                for index, state in states.items()
                if state is not None
            ]
    return tuple(found)


def _fill(model: Any) -> DynamicCache:
    """What a forward with a cache leaves in it."""
    cache = DynamicCache(config=model.config)
    try:
        with torch.inference_mode():
            model(**tokens_and_cache(model, cache, NUM_TOKENS, "meta"))
    except Exception as error:  # the code of any model
        raise ConfigError(
            f"the states of {type(model).__name__} can't be followed ({type(error).__name__}: "
            f"{error}); it isn't supported yet."
        ) from error
    return cache


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), None


def _spec(layer: int, number: int, kind: Any, state: Tensor) -> StateSpec:
    if state.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"layer {layer} keeps states of {state.dtype}; that isn't supported yet.")
    return StateSpec(layer, number, kind, tuple(state.shape[1:]), state.dtype == torch.float32)
