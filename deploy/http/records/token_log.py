"""`TokenLog`: writes the tokens of the answers that a process makes, beside their requests.

Every token follows from the request. Those that are known needn't be computed again, which is a
prefill instead of a decode for who goes on with an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from deploy.http.records.store import Record, RecordStore
from engine.errors import RequestError

PERIOD_S = 2.0
_HEAD = 3
"""Numbers that stand before the tokens of a piece: sequence, position of the first one, count."""


class AnswerTokens:
    """The tokens of one answer so far, by sequence."""

    def __init__(self, record: Record, num_sequences: int, known: Sequence[Sequence[int]]) -> None:
        """`known`: those in the store, which come again."""
        self.record = record
        self._ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self._written = [len(ids) for ids in known] or [0] * num_sequences
        self._before = self._written

    def add(self, index: int, ids: Sequence[int]) -> None:
        """More of a sequence."""
        self._ids[index] += ids

    def take(self) -> bytes:
        """What isn't in the store, in pieces; it counts as written from now on, unless `undo`."""
        pieces: list[int] = []
        self._before = list(self._written)
        for index, (ids, written) in enumerate(zip(self._ids, self._written, strict=True)):
            if len(ids) > written:
                pieces += (index, written, len(ids) - written, *ids[written:])
                self._written[index] = len(ids)
        return np.asarray(pieces, "<i4").tobytes()

    def undo(self) -> None:
        """What was taken last couldn't be written."""
        self._written = self._before


def read_tokens(data: bytes, num_sequences: int) -> list[list[int]]:
    """The tokens of each sequence in `data`, pieces of any writers. What lies behind a gap is left
    out."""
    found: list[list[int]] = [[] for _ in range(num_sequences)]
    numbers = np.frombuffer(data, "<i4").tolist()
    at = 0
    while at + _HEAD <= len(numbers):
        index, start, count = numbers[at : at + _HEAD]
        at += _HEAD
        if index < num_sequences and start <= len(found[index]) < start + count:
            found[index][start:] = numbers[at : at + count]
        at += count
    return found


class TokenLog:
    """Of one process: one write for all of its open answers."""

    def __init__(self, store: RecordStore, age_s: float | None = None) -> None:
        """`age_s`: as long a record is there at least behind the last write."""
        self._store = store
        self._age_s = age_s
        self._open: set[AnswerTokens] = set()
        self._timer: asyncio.TimerHandle | None = None
        """Of the next write; set while an answer is open and nothing is written."""
        self._writing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Open answers."""
        return len(self._open)

    def open(self, answer: AnswerTokens) -> None:
        """Write its tokens from now on. Its record is in the store."""
        self._open.add(answer)
        self._wait()

    async def close(self, answer: AnswerTokens) -> None:
        """Write the rest of its tokens, and no more. Raises `RequestError`."""
        self.drop(answer)
        if not self._store.is_away:
            await self._write([answer])

    def drop(self, answer: AnswerTokens) -> None:
        """Write no more of its tokens."""
        self._open.discard(answer)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        """Write nothing more of what is open."""
        for answer in list(self._open):
            self.drop(answer)
        if self._writing is not None:
            self._writing.cancel()

    def _wait(self) -> None:
        if self._open and self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            if not self._store.is_away:
                await self._write(list(self._open))
        except RequestError:  # the store has said why; it is tried again
            pass
        finally:
            self._writing = None
            self._wait()

    async def _write(self, answers: Sequence[AnswerTokens]) -> None:
        news = [(answer.record, answer.take()) for answer in answers]
        try:
            if news := [(record, data) for record, data in news if data]:
                await self._store.add_tokens(news, self._age_s)
        except RequestError:
            for answer in answers:
                answer.undo()
            raise
