"""`SharedAnswer`: one question for all who ask it at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class SharedAnswer(Generic[Answer]):
    """Whoever asks while a question is under way gets its answer; so does who asks within
    `fresh_s` seconds of its start. An error is an answer, too. Use from one event loop."""

    def __init__(self, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s = fresh_s
        self._clock = clock
        self._asked: tuple[float, asyncio.Task[Answer]] | None = None

    async def get(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The answer; `ask` is called if there is none that is fresh. Raises what it raised."""
        asked = self._asked
        if asked is None or (asked[1].done() and self._clock() - asked[0] > self._fresh_s):
            asked = self._asked = (self._clock(), asyncio.create_task(ask()))
        # One who leaves doesn't end the question of the others.
        return await asyncio.shield(asked[1])
