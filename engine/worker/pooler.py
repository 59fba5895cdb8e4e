"""`Pooler`: from the hidden states of a step to the embeddings that it completes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.forward_batch import ForwardBatch
from engine.protocol.step import PooledLines


class _RunningSum(NamedTuple):
    """Of the states float32 [hidden] of the first `num_tokens` tokens of the request in `row`."""

    row: int
    num_tokens: int
    states: Tensor


class Pooler:
    """Takes last hidden states, and means, whose sums run in float32 over the chunks of a prompt.

    Of all requests at most one is between its first and last chunk. So there is one running sum:
    that of the newest prompt of several chunks. It is dropped with the last chunk, or replaced by
    the next such prompt if the request was aborted or retracted.
    """

    def __init__(self, final_norm: Callable[[Tensor], Tensor]) -> None:
        """`final_norm`: [N, hidden] -> [N, hidden], a new tensor."""
        self._final_norm = final_norm
        self._running: _RunningSum | None = None

    def __call__(
        self, pooled: PooledLines, batch: ForwardBatch, hidden: Tensor, last: Tensor
    ) -> Tensor:
        """The step's embeddings, float32 [E, hidden], in the order of `pooled`.

        Both arguments are before the final norm: `hidden` [T, hidden], which is read only for
        means, and `last` [L, hidden], the states of `pooled.last`. Raises `ValueError` if an
        earlier chunk of a mean wasn't seen.
        """
        found: list[Tensor] = []
        if len(pooled.last):
            found.append(self._final_norm(last).float())
        if len(pooled.mean):
            end = int(batch.token_starts_cpu[pooled.mean.max() + 1])
            states = self._final_norm(hidden[:end])
            ends = set(pooled.mean_ends.tolist())
            for line in pooled.mean.tolist():
                total = self._add_chunk(line, batch, states, is_last=line in ends)
                if line in ends:
                    found.append(total.div_(int(batch.seq_lens_cpu[line])).unsqueeze(0))
        if not found:
            return hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
        return torch.cat(found)

    def _add_chunk(
        self, line: int, batch: ForwardBatch, states: Tensor, *, is_last: bool
    ) -> Tensor:
        """The sum float32 [hidden] of the request's states so far; kept for the next chunk."""
        start, end = batch.token_starts_cpu[line : line + 2].tolist()
        row, before = int(batch.req_pool_indices_cpu[line]), int(batch.prefix_lens_cpu[line])
        total = states[start:end].sum(0, dtype=torch.float32)
        if before:
            running = self._running
            if running is None or running[:2] != (row, before):
                raise ValueError(f"the first {before} tokens of row {row} weren't summed up")
            total += running.states
            self._running = None
        if not is_last:
            self._running = _RunningSum(row, before + end - start, total)
        return total
