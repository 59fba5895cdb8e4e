"""Log-probabilities of tokens under the model's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocol.messages import TokenLogprobs
from engine.sampling.token_order import TokenOrder

# Bounds the working memory: 64 rows of a 128k vocabulary take 100 MB.
_ROWS_AT_ONCE = 64


class LogprobTensors(NamedTuple):
    """Log-probabilities on the device; `to_host` makes messages of them.

    `token`: float32 [n]; `top_ids` int64 [n, k] and `top` float32 [n, k], best first, ties by id.
    `num_top`: alternatives that each row asked for, at most k.
    """

    token: Tensor
    top_ids: Tensor
    top: Tensor
    num_top: Sequence[int]

    def to_host(self) -> list[TokenLogprobs]:
        """One entry per row. Waits for the device."""
        return [
            TokenLogprobs(logprob, ids[:count], values[:count])
            for logprob, ids, values, count in zip(
                self.token.tolist(),
                self.top_ids.tolist(),
                self.top.tolist(),
                self.num_top,
                strict=True,
            )
        ]


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int], order: TokenOrder
) -> LogprobTensors:
    """Log-probabilities of `token_ids` int64 [n] and each row's `num_top` likeliest tokens.

    `logits` float32 [n, vocab] as the model gave them. Doesn't wait for the device.
    """
    count = max(num_top, default=0)
    token, top_ids, top = [], [], []
    for rows, ids in zip(
        torch.split(logits, _ROWS_AT_ONCE), torch.split(token_ids, _ROWS_AT_ONCE), strict=True
    ):
        logprobs = rows.log_softmax(1)
        token.append(logprobs.gather(1, ids.unsqueeze(1)).squeeze(1))
        if count:
            best = order.best(rows, rows.amax(1, keepdim=True), count)
            top_ids.append(best)
            top.append(logprobs.gather(1, best))
    empty = logits.new_empty((logits.shape[0], 0))
    return LogprobTensors(
        torch.cat(token),
        torch.cat(top_ids) if top_ids else empty.to(torch.int64),
        torch.cat(top) if top else empty,
        num_top,
    )
