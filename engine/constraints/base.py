"""Interface of constraints: one request's allowed tokens, as a bit mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

MaskArray = np.ndarray[Any, np.dtype[np.uint32]]


class Constraint(ABC):
    """How far one request has come in what it may output.

    The state follows the request's committed output tokens, the end-of-sequence token included.
    """

    @classmethod
    @abstractmethod
    def verify(cls, payload: dict[str, Any], vocab_size: int) -> None:
        """Raise `RequestError` if `payload` is wrong, without building anything costly."""

    @classmethod
    @abstractmethod
    def create(
        cls, payload: dict[str, Any], vocab_size: int, eos_token_ids: Collection[int]
    ) -> Constraint:
        """The state before the first output token. Raises `RequestError`.

        `eos_token_ids` end the request: a constraint must allow them where the output may end. The
        set is empty if the model has none or the request ignores them.
        """

    @abstractmethod
    def fill_mask(self, out: MaskArray) -> None:
        """Write the tokens allowed next to `out` [mask_words(vocab_size)]; its old content is lost.

        Bit t % 32 of word t // 32 is set if token t is allowed; at least one is, unless
        `is_terminated`.
        """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by one token. False, and no change, if it isn't allowed."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """The output is complete and nothing may follow: the request ends with "stop"."""


def mask_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask over `vocab_size` tokens."""
    return -(-vocab_size // 32)


def allow_tokens(out: MaskArray, tokens: Iterable[int]) -> None:
    """Set the bits of `tokens` in the mask `out` [W]."""
    ids = np.fromiter(tokens, np.uint32)
    np.bitwise_or.at(out, ids >> np.uint32(5), np.uint32(1) << (ids & np.uint32(31)))
