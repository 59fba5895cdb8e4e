"""`ExpertReport`: a stage tells the scheduler how many tokens its experts got."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.protocol.messages import ExpertTokens
from engine.worker.base import ModelWorker

INTERVAL_S = 1.0
"""Between two reports: reading the counts waits for the device."""


class ExpertReport:
    """One rank of each stage has one: routing is the same on all tensor parallel ranks."""

    def __init__(
        self,
        worker: ModelWorker,
        send: Callable[[ExpertTokens], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker, self._send, self._clock = worker, send, clock
        self._has_news = False
        self._next = 0.0

    def stepped(self) -> None:
        """Note that a step was launched."""
        self._has_news = True

    def send_due(self) -> float | None:
        """Report if it is time. Seconds until the next report; None if there is nothing to tell."""
        if not self._has_news:
            return None
        now = self._clock()
        if now < self._next:
            return self._next - now
        self._send(ExpertTokens(self._worker.expert_tokens()))
        self._has_news, self._next = False, self._clock() + INTERVAL_S
        return None
