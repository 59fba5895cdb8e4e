"""Interface of sampling backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor

from engine.sampling.features.draw import DrawPlan, DrawTable
from engine.sampling.features.logprobs import LogprobTensors, compute_logprobs
from engine.sampling.token_order import TokenOrder


class Drawn(NamedTuple):
    """Drawn tokens int64 [S], and the lines' largest logits [S], NaN if a logit was NaN."""

    token_ids: Tensor
    max_logit: Tensor


class SamplingBackend(ABC):
    """Chooses one token per line from logits that have been adjusted.

    Every backend draws the same token for the same logits, seed and position, up to rounding.
    """

    ignores_plan: ClassVar[bool] = False
    """What `sample` launches depends on the number of lines alone, so that one captured graph
    serves every plan."""
    takes_half: ClassVar[bool] = False
    """`sample` takes logits of a half type, too."""

    def __init__(self, table: DrawTable) -> None:
        self.table = table
        self._order = TokenOrder(table.vocab_size, table.device)

    @abstractmethod
    def sample(self, logits: Tensor, plan: DrawPlan, rows: Tensor, positions: Tensor) -> Drawn:
        """Draw from `logits` float32 [S, vocab] for lines of `rows` at `positions` int64 [S].

        `plan` is `table.plan` of the same rows; `DrawPlan` has the order of the filters. Ids are in
        range for any logits.
        """

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobTensors:
        """Log-probabilities of `token_ids` int64 [n] and each line's `num_top` likeliest tokens.

        `logits` float32 [n, vocab] as the model gave them; they aren't changed.
        """
        return compute_logprobs(logits, token_ids, num_top, self._order)
