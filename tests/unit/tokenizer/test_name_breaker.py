"""NameBreaker: no name is left whole, and nothing else changes."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer.name_breaker import NameBreaker

MARKER = "~^^~"
NAMES = ["<s>", "</s>", "<s><s>x", "<|end|>", "<|end|>>", "[INST]", "[/INST]", "ab", "aba"]
breaker = NameBreaker(NAMES, MARKER)
texts = st.text("<s/>|endx[INST]ab \n", max_size=40) | st.lists(
    st.sampled_from([*NAMES, "<", "|end|>", "x", " "]), max_size=12
).map("".join)


@given(texts)
def test_no_name_is_left_and_the_text_is_the_same(text: str) -> None:
    for broken in (breaker.break_names(text), breaker.break_text(text)):
        assert not [name for name in NAMES if name in broken]
        assert broken.replace(MARKER, "") == text
    if not any(name in text for name in NAMES):
        assert breaker.break_names(text) == text


@given(texts, texts, st.booleans())
def test_no_name_spans_two_texts_and_the_text_between(left: str, right: str, trim: bool) -> None:
    # What a template writes beside a text: the rest of a name, or nothing.
    for name in NAMES:
        for cut in range(1, len(name)):
            before, after = breaker.break_text(left), breaker.break_text(right)
            if trim:
                before, after = before.strip(), after.strip()
            spans = [(before, name[cut:]), (name[:cut], after), (before, after)]
            for one, other in spans:
                border = len(one)
                crossing = [
                    found
                    for candidate in NAMES
                    for found in re.finditer(f"(?={re.escape(candidate)})", one + other)
                    if found.start() < border < found.start() + len(candidate)
                ]
                assert not crossing, (one, other)


def test_texts_that_cannot_make_a_name_stay() -> None:
    for text in ("", " ", "hello", "1 > 2", "1 < 2.", "see [1]:", "y|y"):
        assert breaker.break_text(text) == text
    assert breaker.break_text("<|en \n") == f"<|en{MARKER} \n"
    assert breaker.break_text(" |>") == f" {MARKER}|>"


def test_values() -> None:
    value = {"<s>k": ["<s>", 1, None, True, {"a": ("</s>", 2.5)}]}
    assert breaker.break_value(value) == {
        f"<{MARKER}s>k": [f"<{MARKER}s>", 1, None, True, {"a": [f"<{MARKER}/s>", 2.5]}]
    }


def test_without_names() -> None:
    nothing = NameBreaker([], MARKER)
    assert nothing.break_text("<s> [INST") == "<s> [INST"


def test_time_does_not_grow_with_the_names() -> None:
    many = NameBreaker([f"<|reserved_special_token_{i}|>" for i in range(1000)], MARKER)
    # Nearly a name at every tenth character.
    text = "<|reserved_special_token_" * 4000
    began = time.thread_time()
    assert many.break_names(text) == text
    assert time.thread_time() - began < 0.5
