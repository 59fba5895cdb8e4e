"""Interface of sampling backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from engine.sampling.plan import SamplingPlan
from engine.sampling.state import SamplingState


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

    @abstractmethod
    def sample(self, logits: Tensor, plan: SamplingPlan, slots: Tensor, positions: Tensor) -> Drawn:
        """Draw from `logits` float32 [S, vocab] for rows with `slots` at `positions` int64 [S].

        `plan` is `state.plan` of the same slots. The order is: temperature, then min_p, top_k and
        top_p (on what the others left), then the draw. Ids are in range for any logits.
        """
