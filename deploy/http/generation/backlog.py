"""`Backlog`: the deltas of one sequence that its client isn't ready for."""

from __future__ import annotations

from collections.abc import Iterable

from engine.protocol.tokenizer_messages import TextDelta

MAX_WAITING = 256
"""When this number of deltas waits, they are joined into one."""


class Backlog:
    """Joins deltas when many wait, so that the memory depends on the length of the text alone."""

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []

    def __len__(self) -> int:
        return len(self._deltas)

    def add(self, deltas: Iterable[TextDelta]) -> None:
        self._deltas += deltas
        if len(self._deltas) >= MAX_WAITING:
            self._deltas = [join(self._deltas)]

    def take(self) -> list[TextDelta]:
        """All that were kept, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas


class StreamInterval:
    """Holds the deltas of one sequence back until a number of tokens is there (vLLM's
    `stream_interval`). The first and the last delta never wait."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._held = Backlog()
        self._sent = 0

    def due(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """What is to be sent now that `deltas` have come: nothing, or one delta."""
        self._held.add(deltas)
        newest = deltas[-1]
        waits = self._sent > 0 and newest.num_output - self._sent < self._tokens
        if waits and newest.finish_reason is None:
            return []
        self._sent = newest.num_output
        return [join(self._held.take())]


def join(deltas: Iterable[TextDelta]) -> TextDelta:
    """Join successive deltas of one request; the deltas must not be used afterwards."""
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
