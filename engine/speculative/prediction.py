"""Drafts from the output that a client expects (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculative.ngram import NgramIndex

SHORTEST = 2
LONGEST = 8


class PredictionFollower:
    """One request's place in its prediction.

    While the output equals the prediction, the place moves with it. Where it differs, the place is
    found again by the last tokens of the output.
    """

    def __init__(self, prediction: Sequence[int], output: Sequence[int] = ()) -> None:
        self._index = NgramIndex(SHORTEST, LONGEST, prediction)
        self._next: int | None = 0
        """Place of the token that is expected next; None: unknown."""
        self._tail: list[int] = []
        """The last tokens of the output."""
        self.observe(output)

    def observe(self, tokens: Sequence[int]) -> None:
        """The output went on."""
        expected = self._index.tokens
        place = self._next
        for token in tokens:
            follows = place is not None and place < len(expected) and expected[place] == token
            place = place + 1 if follows and place is not None else None
        self._tail = [*self._tail, *tokens][-LONGEST:]
        if place is None:
            found = self._index.find(self._tail)
            place = found.position + 1 if found.length else None
        self._next = place

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that are expected next."""
        place = self._next
        return [] if place is None or count <= 0 else self._index.tokens[place : place + count]
