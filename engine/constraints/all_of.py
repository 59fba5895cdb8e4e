"""`AllOf`: several constraints at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.constraints.base import Constraint, MaskArray, mask_words


class AllOf(Constraint):
    """Allows what all of `parts` allow, and ends when one of them has ended.

    The parts may leave no token together. The output then ends if it is complete for one of them;
    otherwise the request ends with an error.
    """

    def __init__(self, parts: Sequence[Constraint], vocab_size: int) -> None:
        self._parts = parts
        self._masks = np.zeros((len(parts) - 1, mask_words(vocab_size)), np.uint32)

    def fill_mask(self, out: MaskArray) -> None:
        self._parts[0].fill_mask(out)
        for part, mask in zip(self._parts[1:], self._masks, strict=True):
            part.fill_mask(mask)
            np.bitwise_and(out, mask, out=out)

    def accept(self, token: int) -> bool:
        # A part that refuses ends the request, so the others' progress means nothing then.
        return all(part.accept(token) for part in self._parts)

    @property
    def error(self) -> str:
        return next((part.error for part in self._parts if part.error), "")

    @property
    def is_static(self) -> bool:
        return all(part.is_static for part in self._parts)

    @property
    def may_end(self) -> bool:
        return any(part.may_end for part in self._parts)

    @property
    def is_terminated(self) -> bool:
        return any(part.is_terminated for part in self._parts)
