"""Paged attention by our own kernel on CPU (`engine/csrc/attention.h`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.model_config import ModelConfig
from engine.native.library import require_kernels

# As in engine/csrc/kernels.h. They are asked for before the library is loaded.
MAX_HEAD_DIM = 576
MAX_GROUP = 48
"""Query heads that are taken at once of those that share a key/value head. More of them are taken
in equal shares (`num_shares` in engine/csrc/attention.h)."""


def has_kernels_for(model: ModelConfig) -> bool:
    """Whether the kernels take the sizes of `model`."""
    dims = {dim for call in model.calls for dim in (call.k_dim, call.v_dim)}
    return (
        max(dims, default=0) <= MAX_HEAD_DIM
        and all(size % 2 == 0 for size in (model.hidden_size, model.intermediate_size, *dims))
        and all(_has_shares(call.num_heads // call.num_kv_heads) for call in model.calls)
    )


def _has_shares(group: int) -> bool:
    """Whether a group of query heads has equal shares that aren't much smaller than they may be:
    each reads the keys anew."""
    least = -(-group // MAX_GROUP)
    return any(group % count == 0 for count in range(least, 2 * least + 1))


class _Rows(NamedTuple):
    """Whose queries attend, as int64 tensors."""

    requests: Tensor
    """[n]: row of `req_to_token`."""
    starts: Tensor
    """[n + 1]: row i's queries are [starts[i], starts[i+1]), its last tokens."""
    lengths: Tensor
    """[n]: tokens in the cache once the step is done."""


class CpuAttentionBackend(AttentionBackend):
    """One call for all rows of a step, extend and decode, straight from the pool."""

    supports_sampled_queries = True
    can_be_recorded = True

    def __init__(self, inputs: AttentionInputs) -> None:
        """Raises `ConfigError` if the library of kernels is not there."""
        self.inputs = inputs
        self._kernels: Any = require_kernels()
        self._rows: _Rows | None = None
        self._sampled: _Rows | None = None

    def init_forward(self, batch: ForwardBatch) -> None:
        self._rows = _Rows(
            torch.from_numpy(batch.req_pool_indices_cpu),
            torch.from_numpy(batch.token_starts_cpu),
            torch.from_numpy(batch.seq_lens_cpu),
        )
        self._sampled = _Rows(
            batch.sample_rows, torch.arange(len(batch.sample_rows) + 1), batch.sample_lens
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        return self._attend(self._rows, q, k, v, layer, batch)

    def forward_sampled(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        return self._attend(self._sampled, q, k, v, layer, batch)

    def _attend(
        self,
        rows: _Rows | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> Tensor:
        if rows is None:
            raise ValueError("init_forward must come before forward")
        inputs, call = self.inputs, layer.call
        pool, loc = inputs.pool.get(layer.layer_id), inputs.places(layer, batch)
        if call.kv_of is not None:
            k, v, loc = k[:0], v[:0], loc[:0]
        out: Tensor = self._kernels.attention(
            q,
            k,
            v,
            pool.k,
            pool.v,
            loc,
            inputs.table(layer),
            *rows,
            call.scale,
            call.window or 0,
            call.chunk or 0,
            call.softcap or 0.0,
            layer.sinks,
        )
        return out
