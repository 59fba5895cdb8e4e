"""`Backlog`: the deltas of one sequence that its client isn't ready for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from engine.protocol.tokenizer_messages import TextDelta

MAX_WAITING = 256
"""When this number of deltas waits, they are packed."""


class Backlog:
    """Packs deltas when many wait, so that the memory depends on the length of the text, and some
    bytes for each token. They come out as they were, since a stream's events are numbered."""

    def __init__(self) -> None:
        self._packs: list[_Pack] = []
        self._deltas: list[TextDelta] = []

    def add(self, deltas: Iterable[TextDelta]) -> None:
        self._deltas += deltas
        if len(self._deltas) >= MAX_WAITING:
            self._packs.append(_Pack(self._deltas))
            self._deltas = []

    def __len__(self) -> int:
        """Of what is held: packs, and deltas behind them."""
        return len(self._packs) + len(self._deltas)

    def take(self) -> list[TextDelta]:
        """All that were kept, in order."""
        packs, deltas = self._packs, self._deltas
        self._packs, self._deltas = [], []
        return [*(delta for pack in packs for delta in pack.deltas()), *deltas]


class _Pack:
    """Successive deltas of one sequence, as one and the places where it is cut."""

    def __init__(self, deltas: list[TextDelta]) -> None:
        self._ends = array("I")
        """Of each delta: number of output tokens, then ends of its text, ids and logprobs."""
        ends = [0, 0, 0]
        for delta in deltas:
            ends[0] += len(delta.text)
            ends[1] += len(delta.token_ids)
            ends[2] += len(delta.logprobs or ())
            self._ends.extend((delta.num_output, *ends))
        self._whole = join(deltas)

    def deltas(self) -> Iterator[TextDelta]:
        whole, ends = self._whole, self._ends
        text = tokens = logprobs = 0
        for at in range(0, len(ends), 4):
            num_output, text_end, tokens_end, logprobs_end = ends[at : at + 4]
            delta = TextDelta(
                whole.rid,
                whole.text[text:text_end],
                whole.token_ids[tokens:tokens_end],
                num_output,
                None,
                None,
                whole.num_prompt,
                whole.num_cached,
                whole.logprobs[logprobs:logprobs_end] if whole.logprobs else None,
            )
            if at == 0:
                delta.prompt_logprobs = whole.prompt_logprobs
            if at + 4 == len(ends):
                delta.finish_reason, delta.stop_reason = whole.finish_reason, whole.stop_reason
            text, tokens, logprobs = text_end, tokens_end, logprobs_end
            yield delta


class StreamInterval:
    """Holds the deltas of one sequence back until a number of tokens is there (vLLM's
    `stream_interval`). The first and the last delta never wait."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._held: list[TextDelta] = []
        self._sent = 0

    def due(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """What is to be sent now that `deltas` have come. It doesn't depend on when they do."""
        found = []
        for delta in deltas:
            self._held.append(delta)
            waits = self._sent > 0 and delta.num_output - self._sent < self._tokens
            if waits and delta.finish_reason is None:
                continue
            self._sent = delta.num_output
            found.append(join(self._held))
            self._held = []
        return found


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
