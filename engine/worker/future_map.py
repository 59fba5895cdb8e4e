"""`FutureMap`: the last sampled token of every request, kept on the device.

It is indexed by row, as in SGLang now (once a ring buffer with negative placeholders). A step
writes the tokens that it samples; the next step reads its inputs. Steps run in order on one stream,
so a decode always finds the token of the step before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.forward_batch import ForwardBatch

_UNSET = -1


class FutureMap:
    """The last token of each row: `tokens` int64 [max_rows]. Row 0 is padding."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.tokens = torch.full((max_rows,), _UNSET, dtype=torch.int64, device=device)

    def resolve(self, batch: ForwardBatch) -> None:
        """Replace the -1 placeholders among `batch`'s decode inputs, in place, on the device."""
        inputs = batch.input_ids[batch.num_long_tokens :]
        if len(inputs) == 0:
            return
        known = self.tokens.index_select(0, batch.req_pool_indices[batch.num_long :])
        inputs.copy_(torch.where(inputs < 0, known, inputs))

    def store(self, rows: Tensor, tokens: Tensor) -> None:
        """Remember `tokens` int64 [S] as the last ones of `rows` int64 [S]."""
        self.tokens.index_copy_(0, rows, tokens)
