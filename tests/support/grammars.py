"""Walks through grammars: outputs made of allowed tokens, chosen at random."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.constraints import Constraint, ConstraintSpec, create_constraint, mask_words
from engine.constraints.grammar_compiler import GrammarCompiler
from engine.grammars.model_compiler import make_grammar_compiler
from engine.tokenizer.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "manta-small"
VOCAB = 4096
EOS = (1, 5)


@cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(MODEL)


@cache
def small_compiler() -> GrammarCompiler:
    """The compiler of the small model's grammars."""
    return make_grammar_compiler(ModelConfig.from_pretrained(MODEL))


_SMALL: Any = object()


def start(
    spec: ConstraintSpec,
    eos: tuple[int, ...] = EOS,
    vocab: int = VOCAB,
    compiler: GrammarCompiler | None = _SMALL,
) -> Constraint:
    """The constraint of a request, to the small model unless `compiler` is given."""
    return create_constraint(spec, vocab, eos, small_compiler() if compiler is _SMALL else compiler)


def feed(constraint: Constraint, text: str) -> None:
    """Let the constraint accept a text, token by token."""
    for token in small_tokenizer().encode(text, add_special_tokens=False) if text else ():
        assert constraint.accept(token), f"{text_of([token])!r} of {text!r} isn't allowed"


def allowed(constraint: Constraint, vocab: int = VOCAB) -> np.ndarray:
    """Token ids that the constraint allows next."""
    mask = np.full(mask_words(vocab), 0xDEADBEEF, np.uint32)  # what it held doesn't matter
    constraint.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(
    constraint: Constraint, rng: random.Random, free: int = 40, limit: int = 2000
) -> list[int]:
    """Tokens up to the end, without eos. After `free` tokens it makes for the end."""
    out: list[int] = []
    while not constraint.is_terminated:
        ids = allowed(constraint)
        assert len(ids), f"nothing is allowed: {constraint.error}"
        ends = [t for t in EOS if t in ids]
        token = int(rng.choice(ids))
        if ends and (len(out) >= free or rng.random() < 0.5):
            token = ends[0]
        elif len(out) >= free and rng.random() < 0.9:
            token = next((t for t in _closing(text_of(out), rng) if t in ids), token)
        assert constraint.accept(token), f"token {token} is in the mask and isn't accepted"
        if token not in EOS:
            out.append(token)
        assert len(out) < limit, text_of(out)[:200]
    return out


def _closing(text: str, rng: random.Random) -> list[int]:
    """Tokens that lead from `text` to the end of most outputs, the best first."""
    in_string = len(re.findall(r'(?:[^"\\]|\\.)*"', text)) % 2
    first = ['"'] if in_string else ["]", "}"]
    others = list('":@.-eals0Z+e]}')
    rng.shuffle(others)
    return [_token(char) for char in [*first, *others]]


@cache
def _token(char: str) -> int:
    (token,) = small_tokenizer().encode(char, add_special_tokens=False)
    return token


def text_of(tokens: list[int]) -> str:
    """The text of an output of the small model."""
    return small_tokenizer().decode(tokens, skip_special_tokens=False)
