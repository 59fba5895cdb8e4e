"""Sampling state of all rows of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.protocol.step import RowParams
from engine.sampling.features import ADJUSTMENTS
from engine.sampling.features.base import Adjustment, SamplingFeature
from engine.sampling.features.draw import DrawPlan, DrawTable
from engine.sampling.features.logprobs import LogprobGroup, Logprobs

_MAX_PLANS = 32


@dataclass(frozen=True)
class SamplingPlan:
    """What the lines of one batch composition ask for."""

    draw: DrawPlan
    adjustments: tuple[tuple[Adjustment, Any], ...] = ()
    """Those that a line uses, in order, each with its plan."""
    logprobs: LogprobGroup | None = None

    @property
    def only_draws(self) -> bool:
        """No line asks for more than a token, drawn from the logits as they are. What has a fixed
        way to sample (a captured graph) asks this, or `is_plain`, and nothing else."""
        return not self.adjustments and self.logprobs is None

    @property
    def is_plain(self) -> bool:
        """Besides, each token is a line's likeliest or one of the whole vocabulary."""
        return self.draw.is_plain and self.only_draws


class SamplingState:
    """What every row's request asks of the sampler, feature by feature.

    Rows are installed when a request takes them and again when it comes back after a retraction or
    a resume; everything else that sampling depends on is a function of the tokens, so nothing has
    to be saved in between.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.draw = DrawTable(max_rows, vocab_size, self.device)
        self.logprobs = Logprobs(max_rows, vocab_size, self.device)
        self.adjustments = [make(vocab_size, self.device) for make in ADJUSTMENTS]
        self._features: list[SamplingFeature] = [self.draw, self.logprobs, *self.adjustments]
        self._plans: dict[bytes, SamplingPlan] = {}

    @torch.inference_mode()
    def install(self, items: Sequence[RowParams]) -> None:
        """Set the state of rows; of a row named twice the last entry counts.

        Raises `ValueError` if a row samples without a seed (admission draws one) or uses penalties
        and came without its tokens; then no row has changed.
        """
        latest = list({item.row: item for item in items}.values())
        if not latest:
            return
        for feature in self._features:
            for item in latest:
                feature.check(item)
        for feature in self._features:
            feature.install(latest)
        self._plans.clear()

    def plan(self, rows: np.ndarray) -> SamplingPlan:
        """What the batch whose lines are `rows` int [S] needs; kept until the next install."""
        rows = rows.astype(np.int64, copy=False)
        key = rows.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plans = ((feature, feature.plan(rows)) for feature in self.adjustments)
            plan = self._plans[key] = SamplingPlan(
                self.draw.plan(rows),
                tuple((feature, plan) for feature, plan in plans if plan is not None),
                self.logprobs.plan(rows),
            )
        return plan
