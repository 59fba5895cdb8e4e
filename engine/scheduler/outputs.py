"""`OutputCollector`: what steps give to readers, one `StepOutputs` per step and reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from engine.protocol.messages import FinishedReq, StepOutputs
from engine.protocol.step import Int64Array, IntArray, TokenLogprobs
from engine.scheduler.req import Req


@dataclass
class _ReaderOutputs:
    finished: list[FinishedReq] = field(default_factory=list)
    started: list[tuple[int, int, float]] = field(default_factory=list)
    logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities by rid; rids become indices when the message is made."""
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)


class OutputCollector:
    """Outputs since the last `take`. Readers have numbers, so that arrays can group rows."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._pending: dict[int, _ReaderOutputs] = {}
        self._ready: list[tuple[str, StepOutputs]] = []

    def reader_no(self, reply_to: str) -> int:
        """Number of a reader; a new reader gets the next one."""
        number = self._numbers.get(reply_to)
        if number is None:
            number = self._numbers[reply_to] = len(self._names)
            self._names.append(reply_to)
        return number

    def start(self, req: Req) -> None:
        """Note that the first token or the embedding of `req` is in this step."""
        entry = self._entry(req.reader_no)
        entry.started.append((req.rid, req.num_cached or 0, req.queue_s))
        if req.params.prompt_logprobs is not None:
            entry.prompt_logprobs[req.rid] = req.prompt_logprobs[: req.prompt_len]

    def logprobs(self, req: Req, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keep the log-probabilities of the tokens of `req` in this step."""
        self._entry(req.reader_no).logprobs[req.rid] = logprobs

    def embedding(self, req: Req, embedding: bytes) -> None:
        """Keep the embedding of `req`."""
        self._entry(req.reader_no).embeddings[req.rid] = embedding

    def finish(self, reader_no: int, finished: FinishedReq) -> None:
        """Note that a request of this reader ended."""
        self._entry(reader_no).finished.append(finished)

    def close(
        self,
        step: int,
        rids: Int64Array,
        tokens: list[int],
        readers: IntArray,
        counts: list[int] | None = None,
    ) -> None:
        """Make the step's message for every reader concerned; rids and readers are [N]. Each
        request has one of `tokens`, or `counts` [N] of them, one or more, after one another."""
        if len(self._names) <= 1:
            self._emit(step, 0, rids.tolist(), tokens, counts)
        else:
            array = np.asarray(tokens, np.int32)
            owners = readers if counts is None else np.repeat(readers, counts)
            lengths = None if counts is None else np.asarray(counts, np.int32)
            for number in np.unique(readers).tolist():
                mask = readers == number
                self._emit(
                    step,
                    number,
                    rids[mask].tolist(),
                    array[owners == number].tolist(),
                    None if lengths is None else lengths[mask].tolist(),
                )
        self._close_rest(step)

    def take(self, step: int = -1) -> list[tuple[str, StepOutputs]]:
        """(reply_to, message) pairs in order, including ends that no step carried."""
        self._close_rest(step)
        ready, self._ready = self._ready, []
        return ready

    def _close_rest(self, step: int) -> None:
        for number in list(self._pending):
            self._emit(step, number, [], [])

    def _emit(
        self,
        step: int,
        number: int,
        rids: list[int],
        tokens: list[int],
        counts: list[int] | None = None,
    ) -> None:
        entry = self._pending.pop(number, None)
        if entry is None:
            if rids:
                message = StepOutputs(step, rids, tokens, [], [], counts=counts)
                self._ready.append((self._names[number], message))
            return
        logprobs = None
        if entry.logprobs:
            starts = range(len(rids)) if counts is None else accumulate(counts, initial=0)
            index = dict(zip(rids, starts, strict=False))
            logprobs = {
                index[rid] + i: value
                for rid, values in entry.logprobs.items()
                for i, value in enumerate(values)
            }
        message = StepOutputs(
            step,
            rids,
            tokens,
            entry.finished,
            entry.started,
            logprobs,
            entry.prompt_logprobs or None,
            embeddings=entry.embeddings or None,
            counts=counts,
        )
        self._ready.append((self._names[number], message))

    def _entry(self, number: int) -> _ReaderOutputs:
        return self._pending.setdefault(number, _ReaderOutputs())
