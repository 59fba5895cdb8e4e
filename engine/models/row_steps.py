"""`RowSteps`: steps of a model whose layers keep states of requests beside keys and values.

Each prompt's tokens go through the model by themselves, [1, L], behind the states that its earlier
chunks left. Decodes go through it as a batch, [n, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.attention.forward_batch import ForwardBatch
from engine.models.row_cache import RowCache
from engine.models.state_pool import StatePool
from engine.protocol.step import Int64Array

Decoder = Callable[[Tensor, Tensor, RowCache], Tensor]
"""Ids [n, L] at positions [n, L], behind the states in the cache -> hidden states [n, L, hidden]"""


class RowSteps:
    """One model with a pool of states."""

    def __init__(
        self, decode: Decoder, cache: RowCache, pool: StatePool, continues_chunks: bool
    ) -> None:
        """`continues_chunks`: whether the model's code takes several tokens behind a state. False:
        one at a time."""
        self.pool, self.continues_chunks = pool, continues_chunks
        self._decode, self._cache = decode, cache

    def call(self, rows: Int64Array, num_before: int, ids: Tensor, positions: Tensor) -> Tensor:
        """The next tokens of the requests `rows` [n], which have some before if `num_before` > 0:
        ids and positions [n, L] -> [n, L, hidden]."""
        states = self.pool.take(rows)
        self._cache.fill(states, num_before)
        hidden = self._decode(ids, positions, self._cache)
        self.pool.put(rows, self._cache.states())
        return hidden

    def parts(self, batch: ForwardBatch) -> Iterator[ForwardBatch]:
        """The calls that a step is made of, in the order of its tokens."""
        starts = batch.token_starts_cpu.tolist()
        decodes = ((batch.query_lens_cpu == 1) & (batch.prefix_lens_cpu > 0)).tolist()
        line = 0
        while line < batch.batch_size:
            end = line + 1
            while decodes[line] and end < batch.batch_size and decodes[end]:
                end += 1
            size = starts[end] - starts[line]
            if not decodes[line] and not self.continues_chunks and batch.prefix_lens_cpu[line]:
                size = 1
            for first in range(starts[line], starts[end], size):
                yield batch.part(range(line, end), range(first, first + size))
            line = end

    def run(self, batch: ForwardBatch, begin: Callable[[ForwardBatch], None]) -> Tensor:
        """A step: [T, hidden]. `begin` is called before each of its parts."""
        found: list[Tensor] = []
        for part in self.parts(batch):
            begin(part)
            shape = part.batch_size, -1
            num_before = int(part.prefix_lens_cpu[0])
            ids, positions = part.input_ids.view(shape), part.positions.view(shape)
            hidden = self.call(part.req_pool_indices_cpu, num_before, ids, positions)
            found.append(hidden.flatten(0, 1))
        return found[0] if len(found) == 1 else torch.cat(found)
