"""`DeltaStream`: the deltas of one request on their way from the message loop to its handler."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.tokenizer.detokenizer_manager import TextDelta


class DeltaStream:
    """A queue for one reader in the same loop; costs no task and no lock per delta."""

    def __init__(self) -> None:
        self._deltas: deque[TextDelta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, delta: TextDelta) -> None:
        """Add a delta and wake the reader."""
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """No more deltas will come: the reader gets `error` after those already here."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self) -> TextDelta:
        """The next delta. Raises what `fail` was given once there is none left."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._deltas.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
