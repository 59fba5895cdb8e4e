"""`LoadProgress`: how far loading is, as a bar on a terminal and as log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE_PERIOD_S = 10.0


class LoadProgress:
    """Called with (layers done, layers in all) after each layer; for one rank of an engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._last_line = clock()
        self._is_terminal = sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._is_terminal:
            self._draw(done, total)
        now = self._clock()
        if done == total:
            logger.info("weights loaded: %d layers in %.1f s", total, now - self._started)
        elif not self._is_terminal and now - self._last_line >= LINE_PERIOD_S:
            self._last_line = now
            logger.info("loading weights: %d of %d layers", done, total)

    def _draw(self, done: int, total: int) -> None:
        bar = self._bar
        if bar is None:
            bar = self._bar = tqdm(
                total=total, desc="loading weights", unit="layer", file=sys.stderr, leave=False
            )
        bar.update(done - bar.n)
        if done == total:
            bar.close()
