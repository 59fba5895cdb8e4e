"""`TokenFilter`: tokens that a request may use at all, and sequences that it may not write."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from engine.constraints.base import Constraint, MaskArray, mask_words


class TokenFilter(Constraint):
    """vLLM's `allowed_token_ids` and `bad_words`.

    The last token of a bad sequence is forbidden wherever the output ends in the tokens before it.
    Only output tokens count, not the prompt's.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Collection[int] | None,
        bad_sequences: Collection[Sequence[int]],
    ) -> None:
        """`allowed` None: every token. The ids must be within the vocabulary."""
        flags = np.zeros(32 * mask_words(vocab_size), np.bool_)
        flags[slice(vocab_size) if allowed is None else list(allowed)] = True
        flags[[sequence[0] for sequence in bad_sequences if len(sequence) == 1]] = False
        self._base: MaskArray = np.packbits(flags, bitorder="little").view(np.uint32)
        self._longer = [tuple(sequence) for sequence in bad_sequences if len(sequence) > 1]
        self._kept = max(map(len, self._longer), default=1) - 1
        self._tail: list[int] = []
        """The last `_kept` tokens of the output."""

    def fill_mask(self, out: MaskArray) -> None:
        out[:] = self._base
        for token in self._ends_of_bad_sequences():
            out[token >> 5] &= ~(np.uint32(1) << np.uint32(token & 31))

    def accept(self, token: int) -> bool:
        allowed = self._base[token >> 5] >> np.uint32(token & 31) & np.uint32(1)
        if not allowed or token in self._ends_of_bad_sequences():
            return False
        if self._kept:
            self._tail = [*self._tail, token][-self._kept :]
        return True

    @property
    def is_static(self) -> bool:
        return not self._longer

    @property
    def is_terminated(self) -> bool:
        return False

    def _ends_of_bad_sequences(self) -> set[int]:
        tail = tuple(self._tail)
        return {s[-1] for s in self._longer if tail[len(tail) - len(s) + 1 :] == s[:-1]}
