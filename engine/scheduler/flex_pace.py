"""`FlexPace`: how much flex work a step may carry beside interactive requests."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from engine.scheduler.chunk_sizer import LONGEST_S, MIN_POINTS, SHORTEST_S, WINDOW, least_squares

SLOW_STEP = 0.98
"""Of interactive requests' steps, the share that is shorter than one that counts as slow."""
STEPS_SEEN = 512
"""Of so many steps."""
GROWTH = 1.1
"""A step with flex work may be as slow as these, or take so many times as long as without."""
REFIT_EVERY = 16
AFTERMATH_STEPS = 128
"""The next interactive request may come soon: for so many steps behind the last one's, flex
requests alone keep to the same limit, because it would wait for the step in flight."""


class StepWork(NamedTuple):
    """What a step computes, or a part of it."""

    num_tokens: int
    num_context: int
    """Tokens in the KV cache of its rows."""


class StepCost(NamedTuple):
    """Seconds of a step: `base + token * num_tokens + context * num_context`, none negative."""

    base: float
    token: float
    context: float

    def of(self, work: StepWork) -> float:
        """Seconds of a step."""
        return self.base + self.token * work.num_tokens + self.context * work.num_context


UNMEASURED = StepCost(64.0, 1.0, 0.0)
"""Until steps were measured, the unit is a token, and a step costs as much as these besides."""


class FlexPace:
    """Learns from steps what they cost, and how long those of interactive requests are.

    Their slow steps are what their readers notice as the longest gaps. Flex work that fills other
    steps up to that length makes no gap that isn't there without it. It reads no clock.
    """

    def __init__(self) -> None:
        self.cost = UNMEASURED
        self._measured: deque[tuple[StepWork, float]] = deque(maxlen=WINDOW)
        self._interactive: deque[StepWork] = deque(maxlen=STEPS_SEEN)
        """What steps had to compute for interactive requests."""
        self._slow: float | None = None
        self._num_measured = 0
        self._num_steps = 0
        self._last_interactive = -AFTERMATH_STEPS

    def launched(self, interactive: StepWork) -> None:
        """A step goes; of its work, so much is for interactive requests."""
        self._num_steps += 1
        if interactive.num_tokens:
            self._interactive.append(interactive)
            self._last_interactive = self._num_steps
            if self._num_steps % REFIT_EVERY == 0:
                self._slow = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that a step took `seconds`."""
        if work.num_tokens < 1 or not SHORTEST_S <= seconds <= LONGEST_S:
            return
        self._measured.append((work, seconds))
        self._num_measured += 1
        if len(self._measured) >= MIN_POINTS and self._num_measured % MIN_POINTS == 0:
            self.cost = self._fit()
            self._slow = None

    def seconds(self, work: StepWork | None) -> float | None:
        """Those of a step, as far as they are known."""
        return None if self.cost is UNMEASURED or work is None else self.cost.of(work)

    @property
    def is_shared(self) -> bool:
        """Whether there were steps for interactive requests lately."""
        return self._num_steps - self._last_interactive < AFTERMATH_STEPS

    def allowance(self, interactive: StepWork) -> float:
        """Seconds (or what `UNMEASURED` counts) that flex work may add to a step which computes so
        much for interactive requests; inf if there are none, and were none lately."""
        if not interactive.num_tokens and not self.is_shared:
            return math.inf
        own = self.cost.of(interactive)
        return max(self._slow_step(), GROWTH * own) - own

    def _slow_step(self) -> float:
        if self._slow is None:
            times = [self.cost.of(work) for work in self._interactive]
            self._slow = float(np.quantile(times, SLOW_STEP)) if times else 0.0
        return self._slow

    def _fit(self) -> StepCost:
        """Least squares of relative errors; a step that the host disturbed weighs little so."""
        works = np.array([work for work, _ in self._measured], np.float64)
        seconds = np.array([seconds for _, seconds in self._measured])
        columns = np.column_stack([np.ones(len(works)), works])
        scale = columns.max(axis=0)
        found = least_squares(columns / scale / seconds[:, np.newaxis])
        base, token, context = (found / np.maximum(scale, 1.0)).tolist()
        return StepCost(base, token, context)
