"""`TokenChoice`: the output is one of several token sequences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from engine.constraints.base import ALL, ConstraintKind, MaskArray, allow_tokens
from engine.errors import RequestError

if TYPE_CHECKING:
    from engine.constraints.grammar_compiler import GrammarCompiler

MAX_CHOICE_TOKENS = 4096
"""Tokens of all choices together. The scheduler's loop builds the trie: 5 to 15 ms at this size."""


class TokenChoicePayload(msgspec.Struct, forbid_unknown_fields=True):
    """Payload of kind "token_choice"."""

    choices: list[list[int]]
    """Token ids of each choice, without the end-of-sequence token."""


@dataclass(slots=True)
class _Node:
    """A prefix of choices."""

    children: dict[int, _Node] = field(default_factory=dict)
    is_choice: bool = False
    """The prefix is a whole choice: the output may end here."""


class TokenChoice(ConstraintKind):
    """Walks a trie of the choices.

    After a choice, the end-of-sequence token is allowed, and the tokens that lead on to a longer
    choice. Without an end-of-sequence token the output ends where no longer choice goes on. Then,
    if one choice begins with another one, only the longer one can be the output.
    """

    def __init__(
        self, choices: Collection[Collection[int]], eos_token_ids: Collection[int]
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._node = _Node()
        self._ended = False
        for choice in choices:
            node = self._node
            for token in choice:
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = _Node()
                node = child
            node.is_choice = True

    @classmethod
    def verify(cls, payload: dict[str, Any], vocab_size: int) -> None:
        _parse(payload, vocab_size)

    @classmethod
    def create(
        cls,
        payload: dict[str, Any],
        vocab_size: int,
        eos_token_ids: Collection[int],
        grammars: GrammarCompiler | None = None,
    ) -> TokenChoice:
        choices = _parse(payload, vocab_size)
        eos = frozenset(eos_token_ids)
        if not all(eos.isdisjoint(choice) for choice in choices):
            raise RequestError(
                f"constraint: a choice holds an end-of-sequence token ({sorted(eos)}), which would "
                "end it early; leave it out (it is added) or set ignore_eos",
                "constraint",
            )
        return cls(choices, eos)

    def fill_mask(self, out: MaskArray) -> None:
        out.fill(0)
        if self._ended:
            return
        allow_tokens(out, self._node.children)
        if self._node.is_choice:
            allow_tokens(out, self._eos_token_ids)

    def forced(self, most: int) -> list[int]:
        found: list[int] = []
        node = self._node
        while len(found) < most and not self._ended and len(node.children) == 1:
            if node.is_choice and self._eos_token_ids:
                break
            ((token, node),) = node.children.items()
            found.append(token)
        return found

    def fill_masks(self, drafts: Sequence[int], out: MaskArray) -> None:
        self.fill_mask(out[0])
        here = self._node
        out[1:] = ALL
        for draft, behind in zip(drafts, out[1:], strict=True):
            if draft not in self._node.children:
                break
            self._node = self._node.children[draft]
            if self.is_terminated:
                break
            self.fill_mask(behind)
        self._node = here

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        child = self._node.children.get(token)
        if child is not None:
            self._node = child
            return True
        self._ended = self._node.is_choice and token in self._eos_token_ids
        return self._ended

    @property
    def may_end(self) -> bool:
        return self._ended or self._node.is_choice

    @property
    def is_terminated(self) -> bool:
        node = self._node
        return self._ended or (node.is_choice and not node.children and not self._eos_token_ids)


def _parse(payload: dict[str, Any], vocab_size: int) -> list[list[int]]:
    try:
        choices = msgspec.convert(payload, TokenChoicePayload).choices
    except msgspec.ValidationError as error:
        raise RequestError(f"constraint of kind token_choice: {error}", "constraint") from None
    if not choices or not all(choices):
        raise RequestError(
            "constraint: choices needs at least one sequence of at least one token id each",
            "constraint",
        )
    if sum(map(len, choices)) > MAX_CHOICE_TOKENS:
        raise RequestError(
            f"constraint: choices hold more than {MAX_CHOICE_TOKENS} tokens together", "constraint"
        )
    for choice in choices:
        for token in choice:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"constraint: token id {token} is outside the vocabulary "
                    f"(0 to {vocab_size - 1})",
                    "constraint",
                )
    return choices
