"""Models of transformers whose attention is their own code over the keys of transformers' cache.

Falcon, BLOOM, GPT-J and other older code doesn't ask transformers' interface for attention. It
takes what its cache gives: all keys and values of a request. Here those are gathered from the KV
pool, and the new ones are written there, so prefixes are shared as with any other model. Requests
go through the model one by one, which is slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from engine.attention.base import AttentionBackend
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_pool import MHATokenToKVPool
from engine.models.transformers_model import TransformersModel, difference


class GatheredCache(Cache):
    """The keys and values of one request, in a pool."""

    def __init__(self, pool: MHATokenToKVPool) -> None:
        super().__init__(layers=[])
        self._pool = pool

    def begin(self, slots: Tensor, num_before: int) -> None:
        """The tokens behind the first `num_before` of a request are next; `slots` int [S] are those
        of all its tokens."""
        self._slots, self._num_before = slots, num_before
        self._new = slots[num_before:].long()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """[1, heads, L, dim] -> [1, heads, S, dim]"""
        keys, values = (x[0].transpose(0, 1) for x in (key_states, value_states))
        self._pool.set_kv(layer_idx, self._new, keys, values)
        if self._num_before == 0:
            return key_states, value_states
        kv = self._pool.gather(layer_idx, self._slots, key_states.dtype)
        return tuple(x.transpose(0, 1)[None] for x in kv)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_before + query_length, 0


class GatheredModel(TransformersModel):
    """A `Model` (engine/models/base.py) of one rank."""

    plans_attention = True
    attention_name = "eager"

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        hidden: Tensor | None,
        *,
        only_sampled: bool = False,
    ) -> Tensor:
        inputs = backend.inputs
        cache = GatheredCache(inputs.pool)
        starts, before = batch.token_starts_cpu.tolist(), batch.prefix_lens_cpu.tolist()
        found = []
        for line, row in enumerate(batch.req_pool_indices_cpu.tolist()):
            tokens = slice(starts[line], starts[line + 1])
            total = before[line] + tokens.stop - tokens.start
            cache.begin(inputs.req_to_token[row, :total], before[line])
            ids, positions = batch.input_ids[tokens], batch.positions[tokens]
            if self._linears is not None:
                own = None if batch.adapters is None else batch.adapters.part(tokens)
                self._linears.step.begin(own)
            found.append(self._states(self._compute(ids, positions, cache)))
            if batch.mark is not None:
                batch.mark()
        states = torch.cat(found)
        return states.index_select(0, batch.logits_rows) if only_sampled else states

    def _compute(self, ids: Tensor, positions: Tensor, cache: GatheredCache) -> Any:
        """The decoder's output for a request's next tokens [L]."""
        return self._decoder.module(**self._decoder.given(ids[None], positions[None], cache))

    @torch.inference_mode()
    def _differences(self) -> tuple[float, float]:
        """By how much a request that comes in parts differs from one that comes whole, and the
        output head by itself from the whole model's."""
        calls = [layer.call for layer in self.attention_layers]
        numbers = torch.arange(6, device=self.device)
        ids = numbers % self.config.vocab_size
        results = []
        for sizes in ((6,), (3, 2, 1)):
            cache = GatheredCache(MHATokenToKVPool(8, 1, calls, self.dtype, self.device))
            start, parts = 0, []
            for size in sizes:
                part = numbers[start : start + size]
                start += size
                cache.begin(numbers[:start] + 1, start - size)
                parts.append(self._compute(ids[part], part, cache))
            self._decoder.output = type(parts[0])
            results.append(torch.cat([self._states(out) for out in parts]))
        whole, in_parts = results
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, -1]
        head = self.compute_logits(whole[-1:])[0]
        return difference(in_parts, whole), difference(logits, head)
