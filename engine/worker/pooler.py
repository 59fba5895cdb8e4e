"""`Pooler`: from the hidden states of a step to the embeddings that it completes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.forward_batch import ForwardBatch
from engine.protocol.step import PooledLines


class _RunningSum(NamedTuple):
    """Of the states float32 [hidden] of the first `num_tokens` tokens of the request in `slot`."""

    slot: int
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
        self, rows: PooledLines, batch: ForwardBatch, hidden: Tensor, last: Tensor
    ) -> Tensor:
        """The step's embeddings, float32 [E, hidden], in the order of `rows`.

        Both arguments are before the final norm: `hidden` [T, hidden], which is read only for
        means, and `last` [L, hidden], the states of `rows.last`. Raises `ValueError` if an earlier
        chunk of a mean wasn't seen.
        """
        found: list[Tensor] = []
        if len(rows.last):
            found.append(self._final_norm(last).float())
        if len(rows.mean):
            end = int(batch.token_starts_cpu[rows.mean.max() + 1])
            states = self._final_norm(hidden[:end])
            ends = set(rows.mean_ends.tolist())
            for row in rows.mean.tolist():
                total = self._add_chunk(row, batch, states, is_last=row in ends)
                if row in ends:
                    found.append(total.div_(int(batch.seq_lens_cpu[row])).unsqueeze(0))
        if not found:
            return hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
        return torch.cat(found)

    def _add_chunk(self, row: int, batch: ForwardBatch, states: Tensor, *, is_last: bool) -> Tensor:
        """The sum float32 [hidden] of the request's states so far; kept for the next chunk."""
        start, end = batch.token_starts_cpu[row : row + 2].tolist()
        slot, before = int(batch.req_pool_indices_cpu[row]), int(batch.prefix_lens_cpu[row])
        total = states[start:end].sum(0, dtype=torch.float32)
        if before:
            running = self._running
            if running is None or running[:2] != (slot, before):
                raise ValueError(f"the first {before} tokens of slot {slot} weren't summed up")
            total += running.states
            self._running = None
        if not is_last:
            self._running = _RunningSum(slot, before + end - start, total)
        return total
