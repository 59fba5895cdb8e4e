"""Drafters whose guesses tests know: random ones, and right ones with errors in between."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.protocol.step import RowParams
from engine.speculative.config import SpeculativeConfig
from engine.speculative.drafter import Drafter

OUTPUTS = "MANTA_TEST_OUTPUTS"
"""Environment variable: a JSON file with lists of tokens, prompts with their outputs."""


class KeepsTokens(Drafter):
    """Keeps all tokens of each slot."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self.tokens: dict[int, list[int]] = {}

    def install(self, params: RowParams) -> None:
        assert params.token_ids is not None
        self.tokens[params.row] = params.token_ids.tolist()

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        self.tokens[slot] += tokens

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self.guess(self.tokens[s], n) for s, n in zip(slots, counts, strict=True)]

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """At most `count` tokens behind `tokens`."""
        raise NotImplementedError


class RandomDrafter(KeepsTokens):
    """Guesses that are almost never right, of a vocabulary of at least 200."""

    def guess(self, tokens: list[int], count: int) -> list[int]:
        return [zlib.crc32(b"%d %d" % (len(tokens), i)) % 200 for i in range(count)]


class RightUntilError(KeepsTokens):
    """The true tokens, but every fourth or so is wrong."""

    def __init__(
        self, config: SpeculativeConfig, follow: Callable[[list[int]], int | None] | None = None
    ) -> None:
        """`follow` gives the token behind some tokens; without it the file `OUTPUTS` does."""
        super().__init__(config)
        self._follow = follow
        self._known: dict[tuple[int, ...], int] = {}
        if follow is None:
            for known in json.loads(Path(os.environ[OUTPUTS]).read_text()):
                for end in range(1, len(known)):
                    self._known[tuple(known[:end])] = known[end]

    def guess(self, tokens: list[int], count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            so_far = tokens + found
            token = self._known.get(tuple(so_far)) if self._follow is None else self._follow(so_far)
            if token is None:
                break
            wrong = zlib.crc32(b"%d" % len(so_far)) % 4 == 0
            found.append(token ^ 1 if wrong else token)
        return found
