"""Drafts that a constraint gives, and the masks behind each of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.constraints import Constraint, ConstraintSpec, mask_words, structured
from tests.support.grammars import EOS, VOCAB, allowed, feed, small_tokenizer, start, text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 4},
        "kind": {"const": "the only kind of thing"},
        "size": {"enum": ["large", "larger"]},
    },
    "required": ["first_name", "kind", "size"],
    "additionalProperties": False,
}
SPECS = {
    "schema": structured.json_schema(SCHEMA),
    "schema without spaces": structured.json_schema(SCHEMA, any_whitespace=False),
    "regex": structured.regex("(alpha|alphabet)( and all the rest){2}"),
    "choice": structured.choice(["one long choice of words", "one long chain"]),
    "tokens": ConstraintSpec("token_choice", {"choices": [[40, 41, 42, 43, 44], [40, 41, 50]]}),
}


def masks_behind(constraint: Constraint, drafts: list[int]) -> list[set[int]]:
    """Allowed tokens at each place."""
    out = np.full((1 + len(drafts), mask_words(VOCAB)), 0xDEADBEEF, np.uint32)
    constraint.fill_masks(drafts, out)
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("eos", [EOS, ()], ids=["eos", "no eos"])
@pytest.mark.parametrize("name", SPECS)
def test_masks_behind_drafts_are_those_of_the_tokens_accepted(
    name: str, eos: tuple[int, ...]
) -> None:
    """At every state of some outputs, for the forced tokens, and for those with a wrong one."""
    rng = random.Random(name)
    found = 0
    for _ in range(4):
        out: list[int] = []
        constraint = start(SPECS[name], eos)
        while not constraint.is_terminated and len(out) < 60:
            drafts = constraint.forced(5)
            assert len(drafts) <= 5 and not set(drafts) & set(eos)
            found += len(drafts)
            if drafts and rng.random() < 0.3:
                drafts[rng.randrange(len(drafts))] = rng.randrange(10, VOCAB)
            masks = masks_behind(constraint, drafts)
            for place, mask in enumerate(masks):
                other = start(SPECS[name], eos)
                for token in out:
                    assert other.accept(token)
                refused = [not other.accept(token) for token in drafts[:place]]
                if any(refused) or other.is_terminated:
                    assert len(mask) == VOCAB
                    break
                assert mask == set(allowed(other).tolist()), (out, drafts, place)
            token = int(rng.choice(sorted(masks[0])))
            assert constraint.accept(token)
            out.append(token)
    assert found > 4


def test_forced_tokens_are_the_text_that_must_come() -> None:
    constraint = start(SPECS["schema without spaces"])
    feed(constraint, '{"')
    assert text_of(constraint.forced(9)) == 'first_name":'
    feed(constraint, 'first_name":"ab","kind":"')
    forced = constraint.forced(50)
    assert text_of(forced) == 'the only kind of thing","size":"lar'
    assert constraint.forced(2) == forced[:2]
    words = "the only kind of thing"
    assert forced[:4] == small_tokenizer().encode(words, add_special_tokens=False)[:4]


def test_nothing_is_forced_where_there_is_a_choice_or_an_end() -> None:
    assert start(structured.regex("[a-z]*")).forced(4) == []
    constraint = start(ConstraintSpec("token_choice", {"choices": [[40, 41], [40, 41, 42]]}))
    assert constraint.forced(4) == [40, 41]
    for token in (40, 41, EOS[0]):
        assert constraint.accept(token)
    assert constraint.forced(4) == []
