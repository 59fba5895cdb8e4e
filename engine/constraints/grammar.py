"""`Grammar`: the output follows a grammar, by llguidance."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.constraints.base import ALL, ConstraintKind, MaskArray, mask_words
from engine.constraints.grammar_payload import parse_grammar, refused

if TYPE_CHECKING:  # these load llguidance, and clients that only verify don't need it
    from llguidance import LLTokenizer

    from engine.constraints.grammar_compiler import GrammarCompiler
    from engine.constraints.grammar_template import GrammarTemplate

TOO_SLOW = "the grammar takes too long to follow; make it less ambiguous"


class Grammar(ConstraintKind):
    """A copy of a compiled grammar, advanced token by token. Its payload is a `GrammarPayload`.

    Where the output may end, the end-of-sequence tokens are allowed. Without such tokens the output
    ends where nothing may follow.
    """

    def __init__(
        self,
        template: GrammarTemplate,
        tokenizer: LLTokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """`tokenizer` is the one that the template was compiled with."""
        self._template = template
        self._matcher = template.matcher.deep_copy()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ignored_eos = frozenset(tokenizer.eos_tokens) - self._eos_token_ids
        self._vocab_size = vocab_size
        self._wide: MaskArray | None = None
        """The mask, where the tokenizer knows more tokens than the model."""
        if tokenizer.vocab_size > vocab_size:
            self._wide = np.zeros(mask_words(tokenizer.vocab_size), np.uint32)
        self._ended = False
        self._mask: MaskArray | None = None
        """The mask of the current state, once it was made."""
        self._pending: int | None = None
        """An accepted token that the matcher hasn't seen yet."""

    @classmethod
    def verify(cls, payload: dict[str, Any], vocab_size: int) -> None:
        parse_grammar(payload)

    @classmethod
    def create(
        cls,
        payload: dict[str, Any],
        vocab_size: int,
        eos_token_ids: Collection[int],
        grammars: GrammarCompiler | None = None,
    ) -> Grammar:
        if grammars is None:
            raise refused("structured output needs a tokenizer that can be used, and there is none")
        template = grammars.template(payload)
        if template.is_too_slow:
            raise refused(TOO_SLOW)
        return cls(template, grammars.tokenizer, vocab_size, eos_token_ids)

    def fill_mask(self, out: MaskArray) -> None:
        self._mask = out
        if self._ended or self.error:
            out.fill(0)
            return
        started = time.thread_time()
        if self._wide is None:
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        else:
            self._matcher.unsafe_compute_mask_ptr(self._wide.ctypes.data, self._wide.nbytes)
            out[:] = self._wide[: len(out)]
            out[-1] &= np.uint32(2 ** ((self._vocab_size - 1) % 32 + 1) - 1)
        self._template.charge_mask(time.thread_time() - started)
        if self._matcher.is_error():
            out.fill(0)
        for token in self._ignored_eos:
            if token < self._vocab_size:
                out[token >> 5] &= ~np.uint32(1 << (token & 31))

    def forced(self, most: int) -> list[int]:
        if self._ended or self.error:
            return []
        started = time.thread_time()
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._template.charge_mask(time.thread_time() - started)
        ends = self._eos_token_ids | self._ignored_eos
        for i, token in enumerate(tokens):
            if token >= self._vocab_size or token in ends:
                return tokens[: min(i, most)]
        return tokens[:most]

    def fill_masks(self, drafts: Sequence[int], out: MaskArray) -> None:
        self.fill_mask(out[0])
        first, consumed = self._mask, 0
        out[1:] = ALL
        for draft, behind in zip(drafts, out[1:], strict=True):
            if self._ended or self._matcher.is_error() or not self._consume(draft):
                break
            consumed += 1
            if self.is_terminated:
                break
            self.fill_mask(behind)
        if consumed and not self._matcher.rollback(consumed) and not self._matcher.is_error():
            raise RuntimeError(f"the grammar can't go back by {consumed} tokens")
        self._mask = first

    def accept(self, token: int) -> bool:
        if self._ended or token in self._ignored_eos:
            return False
        if token in self._eos_token_ids:
            self._catch_up()
            self._ended = self._matcher.is_accepting()
            return self._ended
        if self._mask is not None:
            # The mask tells. The next step is launched first, then the matcher goes on.
            if not self._mask[token >> 5] >> (token & 31) & 1:
                return False
            self._mask, self._pending = None, token
            return True
        self._catch_up()
        return self._consume(token)

    def _catch_up(self) -> None:
        token, self._pending = self._pending, None
        if token is not None:
            self._consume(token)

    def _consume(self, token: int) -> bool:
        started = time.thread_time()
        count = self._matcher.try_consume_tokens([token])
        self._template.charge_token(time.thread_time() - started)
        return count == 1

    @property
    def error(self) -> str:
        self._catch_up()
        if self._matcher.is_error():
            words, _, _ = self._matcher.get_error().partition("\n")
            return f"the grammar is too complex: {words}"
        return TOO_SLOW if self._template.is_too_slow else ""

    @property
    def may_end(self) -> bool:
        self._catch_up()
        return self._ended or bool(self._matcher.is_accepting())

    @property
    def is_terminated(self) -> bool:
        if self._ended or self._eos_token_ids:
            return self._ended
        self._catch_up()
        return self._matcher.is_stopped() and not self._matcher.is_error()
