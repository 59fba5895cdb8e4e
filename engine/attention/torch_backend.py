"""Paged attention in plain torch: CPU, and any GPU where no faster backend is installed.

Every row attends by itself with scaled_dot_product_attention, over keys and values gathered from
the pool. On CPU most decodes attend in batches instead, over contiguous copies of their keys
and values (`DecodeWorkspace`). Grouped queries never copy keys: the group is a stride-0 dimension
(extend) or part of the query's length (decode).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from engine.attention.decode_workspace import DecodePlan, DecodeWorkspace
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.layout import AttentionCall, beyond_plain

# Query tokens per call when keys precede the chunk: bounds the mask at QUERY_BLOCK x context, and
# keys that a block can't see are never multiplied.
QUERY_BLOCK = 256
# On CPU, chunks of at most this many tokens attend in float32, as decodes do. Rows with drafts
# (16 at most) then give the tokens that they would give without.
FLOAT32_TOKENS = 17


@dataclass
class _ExtendRow:
    """One chunk: tokens [start, start + length) of the step, after `prefix` cached ones."""

    start: int
    length: int
    prefix: int
    row: int
    """Of `req_to_token`."""


@dataclass
class _StepPlan:
    extends: list[_ExtendRow] = field(default_factory=list)
    decodes: list[tuple[int, int, int]] = field(default_factory=list)
    """Decodes that attend one by one, with their rows of `req_to_token` and their lengths."""
    masks: dict[tuple[Hashable, ...], Tensor] = field(default_factory=dict)
    """Masks by what they depend on, shared by the step's rows and layers."""


def make_torch_attention(inputs: AttentionInputs) -> TorchAttentionBackend:
    """The backend that is fastest on the device of `inputs`."""
    on_cpu = inputs.req_to_token.device.type == "cpu"
    is_plain = not beyond_plain([layer.call for layer in inputs.layers])
    make = TorchCpuAttentionBackend if on_cpu and is_plain else TorchAttentionBackend
    return make(inputs)


class TorchAttentionBackend(AttentionBackend):
    """Attention over `MHATokenToKVPool` with torch's own operators, row by row."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs
        self.pool = inputs.pool
        self._plan = _StepPlan()

    def init_forward(self, batch: ForwardBatch) -> None:
        plan = _StepPlan()
        num_long = batch.num_long
        rows = batch.req_pool_indices_cpu
        starts, prefixes = batch.token_starts_cpu.tolist(), batch.prefix_lens_cpu.tolist()
        for i in range(num_long):
            length = starts[i + 1] - starts[i]
            plan.extends.append(_ExtendRow(starts[i], length, prefixes[i], int(rows[i])))
        decode_rows, decode_lens = rows[num_long:], batch.seq_lens_cpu[num_long:]
        for row in self._single_decodes(batch):
            plan.decodes.append((row, int(decode_rows[row]), int(decode_lens[row])))
        self._plan = plan

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        call = layer.call
        if call.kv_of is None:
            self.pool.set_kv(layer.layer_id, self.inputs.places(layer, batch), k, v)
        k, v = self.pool.as_stored(k), self.pool.as_stored(v)
        split = batch.num_long_tokens
        if split == 0:
            return self._decode(q, k, v, layer)
        out = q.new_empty((q.shape[0], call.num_heads * call.v_dim))
        for row in self._plan.extends:
            end = row.start + row.length
            out[row.start : end] = self._extend(
                q[row.start : end], k[row.start : end], v[row.start : end], layer, row
            )
        if split < q.shape[0]:
            out[split:] = self._decode(q[split:], k[split:], v[split:], layer)
        return out

    def _single_decodes(self, batch: ForwardBatch) -> Iterable[int]:
        """Which of the decodes attend one by one."""
        return range(batch.batch_size - batch.num_long)

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: _ExtendRow
    ) -> Tensor:
        """Attention of one chunk: q [L, Hq, D] -> [L, Hq * Dv]."""
        length, call = row.length, layer.call
        if row.prefix == 0:
            keys, values = k, v
            if call.first_key(length - 1) == 0 and not _is_weighted(layer):
                return self._sdpa(q, keys, values, call, None, causal=length > 1)
        else:
            slots = self.inputs.table(layer)[row.row, : row.prefix + length]
            stored = self.pool.gather(layer.layer_id, slots, q.dtype)
            keys, values = stored.k.to(q.dtype), stored.v.to(q.dtype)
        parts = []
        for first in range(0, length, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, length)
            high, low = row.prefix + last, call.first_key(row.prefix + first)
            mask = self._mask(last - first, low, high, call, q)
            parts.append(self._seen(q[first:last], keys[low:high], values[low:high], layer, mask))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Attention of single tokens: q [n, Hq, D] -> [n, Hq * Dv]."""
        n, _, dim = q.shape
        call = layer.call
        grouped = q.view(n, call.num_kv_heads, -1, dim)
        out = q.new_empty((n, call.num_heads * call.v_dim))
        table = self.inputs.table(layer)
        for row, request, total in self._plan.decodes:
            slots = table[request, call.first_key(total - 1) : total]
            kv = self.pool.gather(layer.layer_id, slots, q.dtype)
            if _is_weighted(layer):
                out[row] = self._seen(q[row : row + 1], kv.k, kv.v, layer, None)
                continue
            out[row] = F.scaled_dot_product_attention(
                grouped[row : row + 1],
                kv.k.transpose(0, 1).unsqueeze(0),
                kv.v.transpose(0, 1).unsqueeze(0),
                scale=call.scale,
            ).reshape(-1)
        return out

    def _seen(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Tensor | None
    ) -> Tensor:
        """Over gathered keys: q [L, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv] -> [L, Hq * Dv].

        Scores that are capped or compete with sinks are computed in float32, step by step.
        """
        call, length = layer.call, q.shape[0]
        if not _is_weighted(layer):
            return self._sdpa(q, k, v, call, mask)
        grouped = q.float().view(length, call.num_kv_heads, -1, q.shape[2])
        scores = torch.einsum("lhgd,shd->hgls", grouped, k.float()) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if mask is not None:
            scores += mask.float()
        if layer.sinks is not None:
            sinks = layer.sinks.view(call.num_kv_heads, -1, 1, 1).expand(-1, -1, length, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = torch.einsum("hgls,shd->lhgd", weights, v.float())
        return out.reshape(length, -1).to(q.dtype)

    def _sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        mask: Tensor | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """q [L, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv] -> [L, Hq * Dv]."""
        length, _, dim = q.shape
        group = call.num_heads // call.num_kv_heads
        out = F.scaled_dot_product_attention(
            q.view(length, call.num_kv_heads, group, dim).permute(1, 2, 0, 3),
            k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
            v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=causal,
            scale=call.scale,
        )
        return out.permute(2, 0, 1, 3).reshape(length, -1)

    def _mask(
        self, queries: int, low: int, high: int, call: AttentionCall, like: Tensor
    ) -> Tensor | None:
        """[queries, high - low] of 0 and -inf for keys [low, high); the last query stands at the
        last key. None if all 0."""
        if queries == 1:
            return None
        masks = self._plan.masks
        place = None if call.chunk is None else high % call.chunk
        index = (queries, high - low, place, call.window, call.chunk, like.dtype)
        if index not in masks:
            query = torch.arange(high - queries, high, device=like.device).unsqueeze(1)
            key = torch.arange(low, high, device=like.device)
            hidden = key > query
            if call.window is not None:
                hidden |= key <= query - call.window
            if call.chunk is not None:
                hidden |= key < query // call.chunk * call.chunk
            masks[index] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return masks[index]


def _is_weighted(layer: AttentionLayer) -> bool:
    """Whether scores become weights in a way that torch's own operator hasn't."""
    return layer.call.softcap is not None or layer.sinks is not None


class TorchCpuAttentionBackend(TorchAttentionBackend):
    """Decode rows attend in batches, except those that `DecodeWorkspace` has no room for. For calls
    that differ by their windows and scales alone."""

    def __init__(self, inputs: AttentionInputs) -> None:
        super().__init__(inputs)
        # The size of one more KV cache is enough unless requests share most of their prefixes.
        budget = self.pool.num_bytes * 4 // self.pool.dtype.itemsize
        self.workspace = DecodeWorkspace(inputs, budget)
        self._batched = DecodePlan()

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: _ExtendRow
    ) -> Tensor:
        if row.length > FLOAT32_TOKENS or q.dtype == torch.float32:
            return super()._extend(q, k, v, layer, row)
        return super()._extend(q.float(), k.float(), v.float(), layer, row).to(q.dtype)

    def _single_decodes(self, batch: ForwardBatch) -> Iterable[int]:
        rows = batch.req_pool_indices_cpu
        self.workspace.invalidate(rows[: batch.num_long])
        self.workspace.invalidate(batch.prefix_rows_cpu)
        self._batched = DecodePlan()
        if batch.num_long < batch.batch_size:
            self._batched = self.workspace.plan(
                rows[batch.num_long :], batch.seq_lens_cpu[batch.num_long :], batch.micro_batch
            )
        return self._batched.rest

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        groups = self._batched.groups
        if not groups:
            return super()._decode(q, k, v, layer)
        n, _, dim = q.shape
        call = layer.call
        grouped = q.view(n, call.num_kv_heads, -1, dim)
        qkv = (grouped.float().mul(call.scale), k.float().contiguous(), v.float().contiguous())
        where = layer.layer_id, call.window
        if groups[0].is_whole_step:
            return self.workspace.attend(groups[0], *where, *qkv).to(q.dtype)
        out = super()._decode(q, k, v, layer)
        for group in groups:
            picked = (x.index_select(0, group.rows) for x in qkv)
            result = self.workspace.attend(group, *where, *picked)
            out.index_copy_(0, group.rows, result.to(q.dtype))
        return out
