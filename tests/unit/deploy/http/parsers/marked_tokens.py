"""The small model's tokenizer with the marks of other models as special tokens."""

from __future__ import annotations

import json
from functools import cache

import tokenizers

from engine.constraints import Constraint, ConstraintSpec
from engine.constraints.grammar_compiler import GrammarCompiler
from tests.support.grammars import MODEL, allowed, start

END = 5
"""The small model's end of a turn, named `<|return|>` here."""


class MarkedTokens:
    """`marks` stand behind the small model's vocabulary. `ends`: those that end an output."""

    def __init__(self, marks: list[str], ends: tuple[str, ...] = ()) -> None:
        self.backend = _backend(tuple(marks))
        self.vocab = 4096 + len(marks)
        self.eos = (END, *(4096 + marks.index(end) for end in ends))
        self._compiler = GrammarCompiler(self.backend.to_str, self.vocab, self.eos)

    def begin(self, spec: ConstraintSpec) -> Constraint:
        return start(spec, self.eos, self.vocab, self._compiler)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        assert self.decode(ids) == text
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text

    def next(self, constraint: Constraint) -> set[int]:
        return set(map(int, allowed(constraint, self.vocab)))

    def may_end(self, spec: ConstraintSpec, text: str) -> bool | None:
        """Whether an output may end with the text; None if it can't begin so."""
        constraint = self.begin(spec)
        if not all(constraint.accept(token) for token in self.encode(text)):
            return None
        ends = set(self.eos) & self.next(constraint)
        assert ends in (set(), set(self.eos))
        return bool(ends)


@cache
def _backend(marks: tuple[str, ...]) -> tokenizers.Tokenizer:
    made = json.loads((MODEL / "tokenizer.json").read_text())
    *others, end = made["added_tokens"]
    added = [end | {"id": 4096 + number, "content": mark} for number, mark in enumerate(marks)]
    made["added_tokens"] = [*others, end | {"content": "<|return|>"}, *added]
    vocabulary = made["model"]["vocab"]
    vocabulary["<|return|>"] = vocabulary.pop(end["content"])
    return tokenizers.Tokenizer.from_str(json.dumps(made))
