"""Paged attention by our own kernel on CPU (`engine/csrc/attention.h`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs, AttentionLayer, LatentHeads
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.layout import AttentionCall
from engine.checkpoint.model_config import ModelConfig
from engine.native.library import require_kernels

# As in engine/csrc/kernels.h. They are asked for before the library is loaded.
MAX_HEAD_DIM = 576
EXPANDED_BYTES = 64 << 20
"""Most bytes of keys and values that are made of latents at a time."""


def has_kernels_for(model: ModelConfig) -> bool:
    """Whether the kernels take the sizes of `model`."""
    dims = {dim for call in model.calls for dim in (call.k_dim, call.v_dim)}
    return max(dims, default=0) <= MAX_HEAD_DIM and all(
        size % 2 == 0 for size in (model.hidden_size, model.intermediate_size, *dims)
    )


def expands_from(call: AttentionCall) -> int | None:
    """Tokens of a chunk from which it is less work to make keys and values of the latents that it
    sees than to attend to the latents; None: it never is, or the kernels don't take the former."""
    assert call.latent_of is not None
    own, latent = call.latent_of, call.v_dim
    saved = call.k_dim + latent - own.k_dim - own.v_dim
    made = latent * (own.k_dim - (call.k_dim - latent) + own.v_dim)
    fits = all(dim <= MAX_HEAD_DIM and dim % 2 == 0 for dim in (own.k_dim, own.v_dim))
    return made // saved + 1 if fits and saved > 0 else None


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

    def forward_latent(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        latents: LatentHeads,
    ) -> Tensor:
        """Long chunks attend to keys and values that are made of the latents for them."""
        least = expands_from(layer.call)
        if least is None or not (batch.query_lens_cpu >= least).any():
            return super().forward_latent(q, k, v, layer, batch, latents)
        assert self._rows is not None and layer.call.latent_of is not None
        lens = torch.from_numpy(batch.query_lens_cpu)
        is_short = lens < least
        tokens = is_short.repeat_interleave(lens).nonzero()[:, 0]
        starts = torch.nn.functional.pad(lens[is_short].cumsum(0), (1, 0))
        rows = _Rows(self._rows.requests[is_short], starts, self._rows.lengths[is_short])
        short = latents.queries(q.index_select(0, tokens))
        sums = self._attend(rows, short, k, v, layer, batch)  # stores all that is new
        out = q.new_empty((*q.shape[:2], layer.call.latent_of.v_dim))
        out[tokens] = latents.results(sums.view(*short.shape[:2], layer.call.v_dim))
        for line in (~is_short).nonzero()[:, 0].tolist():
            part = slice(*batch.token_starts_cpu[line : line + 2].tolist())
            out[part] = self._expanded(q[part], layer, batch, line, latents)
        return out

    def _expanded(
        self,
        q: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        line: int,
        latents: LatentHeads,
    ) -> Tensor:
        """Attention of a line's queries [L, heads, dim] to what its latents stand for, some
        heads at a time: [L, heads, v_dim]."""
        call, total = layer.call, int(batch.seq_lens_cpu[line])
        assert call.latent_of is not None
        own = call.latent_of
        slots = self.inputs.table(layer)[int(batch.req_pool_indices_cpu[line]), :total]
        stored = self.inputs.pool.gather(layer.layer_id, slots, q.dtype).k[:, 0]
        some = EXPANDED_BYTES // (total * (own.k_dim + own.v_dim) * q.element_size())
        places = torch.arange(total, dtype=torch.int32)[None]
        nothing = torch.empty(0, dtype=torch.int64)
        found = []
        for first in range(0, call.num_heads, max(some, 1)):
            heads = slice(first, min(first + max(some, 1), call.num_heads))
            keys, values = latents.expand(stored, heads)
            out: Tensor = self._kernels.attention(
                q[:, heads],
                keys[:0],
                values[:0],
                keys,
                values,
                nothing,
                places,
                torch.zeros(1, dtype=torch.int64),
                torch.tensor([0, len(q)]),
                torch.tensor([total]),
                call.scale,
                call.window or 0,
                call.chunk or 0,
                call.softcap or 0.0,
                None if layer.sinks is None else layer.sinks[heads].contiguous(),
            )
            found.append(out.view(len(q), -1, own.v_dim))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

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
