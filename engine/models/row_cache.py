"""`RowCache`: transformers' cache as the states of some requests; keys and values are elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from engine.checkpoint.layout import StateSpec

# Without types: their classes, inherited together, contradict each other in some attributes.
_DynamicLayer: Any = DynamicLayer
_LinearAttentionLayer: Any = LinearAttentionLayer


def cache_argument(model: Any) -> str:
    """The name under which the model's forward takes its cache."""
    known = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in known else "past_key_values"


def tokens_and_cache(model: Any, cache: Cache, count: int, device: str) -> dict[str, Any]:
    """The arguments of a forward of `count` tokens, whatever they are, that fills `cache`."""
    given: dict[str, Any] = {
        "input_ids": torch.zeros((1, count), dtype=torch.long, device=device),
        "use_cache": True,
        cache_argument(model): cache,
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = torch.arange(count)[None].to(device)
    return given


class _PassedOn(_DynamicLayer):  # type: ignore[misc]
    """Hands keys and values on as they come: the attention function keeps them."""

    num_before = 0
    """Tokens of the request before those of the call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.num_before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_before + query_length, 0


class _PassedOnWithStates(_LinearAttentionLayer, _PassedOn):  # type: ignore[misc]
    """The same for a layer that has states, too."""

    def __init__(self, number_of_states: int) -> None:
        _PassedOn.__init__(self)
        _LinearAttentionLayer.__init__(self, number_of_states)


class RowCache(Cache):
    """For one model. Calls are made with the states of their requests in it."""

    def __init__(self, config: Any, specs: Sequence[StateSpec]) -> None:
        super().__init__(layers=[_layer(found) for found in DynamicCache(config=config).layers])
        self._specs = specs

    def fill(self, states: Sequence[Tensor], num_before: int) -> None:
        """The next call continues `states`, one tensor [n, *shape] for each spec, behind
        `num_before` tokens. With 0 it ignores what they hold. It changes them in place."""
        for spec, state in zip(self._specs, states, strict=True):
            layer: Any = self.layers[spec.layer]
            layer.dtype, layer.device = state.dtype, state.device
            layer.has_previous_state[spec.number] = num_before > 0
            if spec.kind == "conv":
                layer.conv_states[spec.number] = state
                layer.conv_kernel_size[spec.number] = state.shape[-1]
                layer.is_conv_states_initialized[spec.number] = True
            else:
                layer.recurrent_states[spec.number] = state
                layer.is_recurrent_states_initialized[spec.number] = True
        for layer in self.layers:
            if isinstance(layer, _PassedOn):
                layer.num_before = num_before

    def states(self) -> list[Tensor]:
        """What the call has left."""
        found: list[Tensor] = []
        for spec in self._specs:
            layer: Any = self.layers[spec.layer]
            kept = layer.conv_states if spec.kind == "conv" else layer.recurrent_states
            found.append(kept[spec.number])
        return found


def _layer(layer: Any) -> Any:
    if isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, CacheLayerMixin):
        return _PassedOnWithStates(layer.number_of_states)
    return _PassedOn() if isinstance(layer, CacheLayerMixin) else layer
