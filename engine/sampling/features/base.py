"""Interface of what requests may ask of the sampler beside the draw: `SamplingFeature`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.protocol.step import Int64Array, RowParams
from engine.sampling.draft_check import DraftCheck


class SampledLines(NamedTuple):
    """What the sampler knows of the S tokens that it chooses, beside their logits."""

    rows: Tensor
    """int64 [S]: row of the request."""
    seq_lens: Tensor
    """int64 [S]: tokens in the KV cache, which is the position of the new token."""
    check: DraftCheck | None = None
    """Set in a step that checks drafts: those before a token count as output (`earlier`)."""


class SamplingFeature(ABC):
    """One thing that requests may ask for. It keeps what it needs by row (`ReqToTokenPool`).

    A batch of which no line uses it has no plan for it (`plan` is None), and is spared its cost.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device

    def check(self, item: RowParams) -> None:  # noqa: B027 -- most can take any row
        """Raise `ValueError` if the row can't be installed. Nothing has changed then."""

    @abstractmethod
    def install(self, items: Sequence[RowParams]) -> None:
        """Set the state of rows, each named once, and forget what they had."""

    @abstractmethod
    def plan(self, rows: Int64Array) -> Any | None:
        """What the batch whose lines are `rows` [S] needs; None: no line uses the feature. It holds
        until the next `install`."""


class Adjustment(SamplingFeature):
    """A feature that changes logits before the draw."""

    @abstractmethod
    def apply(self, plan: Any, logits: Tensor, lines: SampledLines) -> None:
        """Change `logits` float32 [S, vocab] in place. Doesn't wait for the device."""

    def drawn(self, plan: Any, token_ids: Tensor, kept: Tensor | None) -> None:
        """The lines' tokens `token_ids` int64 [S] were drawn. `kept` bool [S]: those that are
        output; None: all are."""
