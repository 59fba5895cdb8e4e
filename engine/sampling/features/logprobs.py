"""Log-probabilities of tokens under the model's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.step import Int64Array, RowParams, TokenLogprobs
from engine.sampling.features.base import SamplingFeature
from engine.sampling.line_group import LineGroup, line_group
from engine.sampling.token_order import TokenOrder

# Bounds the working memory: 64 rows of a 128k vocabulary take 100 MB.
_ROWS_AT_ONCE = 64


class LogprobTensors(NamedTuple):
    """Log-probabilities on the device; `to_host` makes messages of them.

    `token`: float32 [n]; `top_ids` int64 [n, k] and `top` float32 [n, k]: the tokens that a line
    listed, in its order, then the likeliest, best first, ties by id. `num_top`: entries of each
    line, at most k.
    `rank`: int64 [n], 1 for the likeliest token; None if nobody asked.
    """

    token: Tensor
    top_ids: Tensor
    top: Tensor
    num_top: Sequence[int]
    rank: Tensor | None = None

    def to_host(self) -> list[TokenLogprobs]:
        """One entry per line. Waits for the device."""
        ranks = [0] * len(self.num_top) if self.rank is None else self.rank.tolist()
        return [
            TokenLogprobs(logprob, ids[:count], values[:count], rank)
            for logprob, ids, values, count, rank in zip(
                self.token.tolist(),
                self.top_ids.tolist(),
                self.top.tolist(),
                self.num_top,
                ranks,
                strict=True,
            )
        ]


class ListedTokens(NamedTuple):
    """Tokens whose log-probabilities some lines want besides the likeliest ones'."""

    ids: Tensor
    """int64 [n, m], padded with 0."""
    order: Tensor
    """int64 [n, w]: of each line's m listed and k likeliest tokens those that it reports, the
    listed ones first; padded with 0."""
    counts: Sequence[int]
    """[n]: tokens listed; 0 for lines that listed none."""

    def before_top(
        self, found: LogprobTensors, logits: Tensor, token_ids: Tensor
    ) -> LogprobTensors:
        """`found` of `logits` float32 [n, vocab] and `token_ids` int64 [n], with the listed tokens
        before the likeliest."""
        # The log of the sum is the token's logit less its log-probability: no second softmax.
        own = logits.gather(1, token_ids.unsqueeze(1))
        listed = logits.gather(1, self.ids) - own + found.token.unsqueeze(1)
        return found._replace(
            top_ids=torch.cat([self.ids, found.top_ids], 1).gather(1, self.order),
            top=torch.cat([listed, found.top], 1).gather(1, self.order),
            num_top=[count + top for count, top in zip(self.counts, found.num_top, strict=True)],
        )


@dataclass(frozen=True)
class LogprobGroup:
    """Lines that want log-probabilities, and how many alternatives each (host int [count])."""

    lines: LineGroup
    num_top: np.ndarray
    lines_cpu: Int64Array
    """[count]: the lines' numbers in the batch."""
    listed: ListedTokens | None = None
    """Tokens that lines named instead of asking for the likeliest."""


class Logprobs(SamplingFeature):
    """`SamplingParams.logprobs` and `logprob_token_ids`. It changes no token: the sampler takes a
    copy of the logits before all adjustments."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._num_top = np.full(max_rows, -1, dtype=np.int64)
        self._listed: dict[int, list[int]] = {}

    def install(self, items: Sequence[RowParams]) -> None:
        for item in items:
            params = item.params
            self._num_top[item.row] = -1 if params.logprobs is None else params.logprobs
            self._listed.pop(item.row, None)
            if params.logprob_token_ids:
                self._listed[item.row] = params.logprob_token_ids

    def plan(self, rows: Int64Array) -> LogprobGroup | None:
        num_top = self._num_top[rows]
        chosen = num_top >= 0
        lines = line_group(chosen, self.device)
        if lines is None:
            return None
        listed = self._plan_listed(rows[chosen], num_top[chosen])
        return LogprobGroup(lines, num_top[chosen], np.flatnonzero(chosen), listed)

    def _plan_listed(self, rows: Int64Array, num_top: np.ndarray) -> ListedTokens | None:
        lists = [self._listed.get(row, []) for row in rows.tolist()]
        counts = [len(ids) for ids in lists]
        if not any(counts):
            return None
        most = max(counts)
        padded = np.zeros((len(lists), most), dtype=np.int64)
        order = np.zeros((len(lists), int((num_top + counts).max())), dtype=np.int64)
        for line, (ids, top) in enumerate(zip(lists, num_top.tolist(), strict=True)):
            padded[line, : len(ids)] = ids
            order[line, : len(ids) + top] = [*range(len(ids)), *range(most, most + top)]
        return ListedTokens(to_device(padded, self.device), to_device(order, self.device), counts)


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [n]: 1 + the number of tokens likelier than `token_ids` int64 [n].

    `logits` float32 [n, vocab].
    """
    own = logits.gather(1, token_ids.unsqueeze(1))
    return (logits > own).sum(1) + 1


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int], order: TokenOrder
) -> LogprobTensors:
    """Log-probabilities of `token_ids` int64 [n] and each line's `num_top` likeliest tokens.

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
