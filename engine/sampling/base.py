"""Interface of sampling backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.sampling.logprobs import LogprobTensors, compute_logprobs
from engine.sampling.plan import SamplingPlan
from engine.sampling.state import SamplingState
from engine.sampling.token_order import TokenOrder


class Drawn(NamedTuple):
    """Drawn tokens int64 [S], and the rows' largest logits [S], NaN if a logit was NaN."""

    token_ids: Tensor
    row_max: Tensor


class SamplingBackend(ABC):
    """Chooses one token per row from logits that bias and penalties have been applied to.

    Every backend draws the same token for the same logits, seed and position, up to rounding.
    """

    def __init__(self, state: SamplingState) -> None:
        self.state = state
        self._order = TokenOrder(state.vocab_size, state.device)

    @abstractmethod
    def sample(self, logits: Tensor, plan: SamplingPlan, slots: Tensor, positions: Tensor) -> Drawn:
        """Draw from `logits` float32 [S, vocab] for rows with `slots` at `positions` int64 [S].

        `plan` is `state.plan` of the same slots. The order is: temperature, then min_p, top_k and
        top_p (on what the others left), then the draw. Ids are in range for any logits.
        """

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobTensors:
        """Log-probabilities of `token_ids` int64 [n] and each row's `num_top` likeliest tokens.

        `logits` float32 [n, vocab] as the model gave them; they aren't changed.
        """
        return compute_logprobs(logits, token_ids, num_top, self._order)
