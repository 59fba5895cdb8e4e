"""Interface of constraints: one request's allowed tokens, as a bit mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from engine.constraints.grammar_compiler import GrammarCompiler  # loads llguidance

MaskArray = np.ndarray[Any, np.dtype[np.uint32]]
ALL = np.uint32(0xFFFFFFFF)
"""Part of a mask that allows all tokens."""


class ConstraintSpec(msgspec.Struct):
    """Names a constraint and holds its details as plain data.

    `kind` is a key of `engine.constraints.registry.CONSTRAINTS`; each kind says in its class what
    `payload` holds.
    """

    kind: str
    payload: dict[str, Any]
    field: str = ""
    """The field of the request that says it, for errors; "" if they name none."""


class Constraint(ABC):
    """How far one request has come in what it may output.

    The state follows the request's committed output tokens, the end-of-sequence token included.
    """

    @abstractmethod
    def fill_mask(self, out: MaskArray) -> None:
        """Write the tokens allowed next to `out` [mask_words(vocab_size)]; its old content is lost.

        `out` is kept until the next `accept`; the caller may only clear bits of it till then.
        Bit t % 32 of word t // 32 is set if token t is allowed; at least one is, unless
        `is_terminated` or `error`.
        """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by one token. False, and no change, if it isn't allowed."""

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens that the output probably goes on with, because the constraint
        leaves only one text. Its tokens may be cut in other ways, so these are guesses."""
        return []

    def fill_masks(self, drafts: Sequence[int], out: MaskArray) -> None:
        """`fill_mask` to `out[0]`, and to `out[1 + i]` as it would be behind `drafts[: i + 1]`.

        `drafts` begin a `forced`. Behind a draft that isn't allowed, or that ends the output, every
        token is allowed: none can be output there. The state doesn't change.
        """
        out[1:] = ALL
        self.fill_mask(out[0])

    @property
    def error(self) -> str:
        """Why the constraint can't go on, which ends the request with an error; "" if it can."""
        return ""

    @property
    def is_static(self) -> bool:
        """The mask is the same at every token: nobody has to wait for the tokens before."""
        return False

    @property
    def may_end(self) -> bool:
        """The output is complete, though more may follow: it ends where nothing that may follow can
        be sampled."""
        return self.is_terminated

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """The output is complete and nothing may follow: the request ends with "stop"."""


class ConstraintKind(Constraint):
    """A constraint that a `ConstraintSpec` names: made from plain data."""

    @classmethod
    @abstractmethod
    def verify(cls, payload: dict[str, Any], vocab_size: int) -> None:
        """Raise `RequestError` if `payload` is wrong, without building anything costly."""

    @classmethod
    @abstractmethod
    def create(
        cls,
        payload: dict[str, Any],
        vocab_size: int,
        eos_token_ids: Collection[int],
        grammars: GrammarCompiler | None = None,
    ) -> Constraint:
        """The state before the first output token. Raises `RequestError`.

        `eos_token_ids` end the request: a constraint must allow them where the output may end. The
        set is empty if the model has none or the request ignores them. `grammars` knows the model's
        tokenizer; None if it has none.
        """


def mask_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask over `vocab_size` tokens."""
    return -(-vocab_size // 32)


def allow_tokens(out: MaskArray, tokens: Iterable[int]) -> None:
    """Set the bits of `tokens` in the mask `out` [W]."""
    ids = np.fromiter(tokens, np.uint32)
    np.bitwise_or.at(out, ids >> np.uint32(5), np.uint32(1) << (ids & np.uint32(31)))
