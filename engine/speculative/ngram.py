"""Drafts by n-grams of the request's own tokens (prompt lookup decoding, Saxena 2023).

The end of the tokens is looked for in the tokens before; what followed there is the draft. Every
n-gram is indexed once: those of the prompt when the request comes, those of its output at the next
look-up. So a look-up costs the same in a long context as in a short one, and output costs nothing
where nothing is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.protocol.step import RowParams
from engine.speculative.config import SpeculativeConfig
from engine.speculative.drafter import Drafter

MAX_CANDIDATES = 8
"""Places that a look-up compares, the latest ones."""


class Match(NamedTuple):
    """Where the end of some tokens was found before."""

    length: int
    """Tokens that are equal, at most `longest` of the index."""
    position: int
    """Of the last of them."""


NO_MATCH = Match(0, -1)


class NgramIndex:
    """The tokens of one request, with the places of all its `shortest`-grams.

    The one at the end isn't indexed: it would only find itself.
    """

    def __init__(self, shortest: int, longest: int, tokens: Sequence[int] = ()) -> None:
        self.shortest, self.longest = shortest, longest
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """By n-gram, the position of its last token where it stood last."""
        self.before: list[int] = []
        """By position: where the n-gram that ends there stood before, -1 if nowhere. After a
        look-up it has one entry for every token but the last."""
        self.extend(tokens)
        self._catch_up()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.tokens.extend(tokens)

    def _catch_up(self) -> None:
        """Index what came since the last look-up."""
        known, size, latest, before = self.tokens, self.shortest, self._latest, self.before
        for end in range(len(before), len(known) - 1):
            if end < size - 1:
                before.append(-1)
                continue
            gram = tuple(known[end - size + 1 : end + 1])
            before.append(latest.get(gram, -1))
            latest[gram] = end

    def find(self, ending: Sequence[int]) -> Match:
        """The longest end of `ending` that stands in this index; of equal ones the latest."""
        size = self.shortest
        if len(ending) < size:
            return NO_MATCH
        self._catch_up()
        position = self._latest.get(tuple(ending[-size:]), -1)
        best = NO_MATCH
        for _ in range(MAX_CANDIDATES):
            if position < 0:
                break
            length = self._equal(ending, position)
            if length > best.length:
                best = Match(length, position)
                if length == self.longest:
                    break
            position = self.before[position]
        return best

    def after(self, position: int, count: int) -> list[int]:
        """`count` tokens that follow `position`. Where the tokens end they are assumed to go on as
        they did since then: the end of the text repeats what is behind `position`."""
        found = self.tokens[position + 1 : position + 1 + count]
        if found and len(found) < count:
            found = (found * (count // len(found) + 1))[:count]
        return found

    def _equal(self, ending: Sequence[int], position: int) -> int:
        """Tokens, counted from the end of `ending`, that are equal to those up to `position`."""
        known = self.tokens
        length, most = self.shortest, min(self.longest, len(ending), position + 1)
        while length < most and known[position - length] == ending[-1 - length]:
            length += 1
        return length


class NgramDrafter(Drafter):
    """vLLM's method `ngram`, with the latest of the longest matches instead of the first."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._indexes: dict[int, NgramIndex] = {}

    def install(self, params: RowParams) -> None:
        assert params.token_ids is not None
        self._indexes[params.row] = NgramIndex(
            self.config.lookup_min, self.config.lookup_max, params.token_ids.tolist()
        )

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        self._indexes[row].extend(tokens)

    def propose(self, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self._propose(row, count) for row, count in zip(rows, counts, strict=True)]

    def _propose(self, row: int, count: int) -> list[int]:
        index = self._indexes[row]
        if count <= 0:
            return []
        found = index.find(index.tokens)
        return index.after(found.position, count) if found.length else []
