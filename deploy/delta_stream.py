"""`DeltaStream`: the deltas of one request on their way from the message loop to its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.tokenizer.detokenizer_manager import TextDelta

MAX_WAITING = 256
"""Deltas that wait for a slow reader before they are made one."""


class DeltaStream:
    """A queue for one reader in the same loop; costs no task and no lock per delta.

    A reader that doesn't keep up gets several deltas as one, so a stream's memory is bounded by
    its output.
    """

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._deltas)

    def push(self, delta: TextDelta) -> None:
        """Add a delta and wake the reader."""
        self._deltas.append(delta)
        if len(self._deltas) >= MAX_WAITING:
            self._deltas = [join(self._deltas)]
        self._wake()

    def fail(self, error: Exception) -> None:
        """No more deltas will come: the reader gets `error` after those already here."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self) -> list[TextDelta]:
        """All deltas that are here, at least one. Raises what `fail` was given once there are
        none left."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def join(deltas: Iterable[TextDelta]) -> TextDelta:
    """Successive deltas of one request as one; they are used up."""
    first, *others = deltas
    texts = [first.text]
    for delta in others:
        texts.append(delta.text)
        first.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if first.logprobs is None:
                first.logprobs = []
            first.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            first.finish_reason, first.stop_reason = delta.finish_reason, delta.stop_reason
            first.error, first.error_status = delta.error, delta.error_status
            first.error_param = delta.error_param
        first.num_output, first.num_cached = delta.num_output, delta.num_cached
    first.text = "".join(texts)
    return first
