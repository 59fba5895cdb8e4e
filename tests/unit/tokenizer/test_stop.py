"""StopChecker against a naive search on the whole text, cut in random pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer.stop import StopChecker

# Other processes share the cores: no deadline.
relaxed = settings(max_examples=100)

# Few letters, so that stop strings overlap themselves, each other and the text.
texts = st.text("ab", max_size=40)
stops = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


def naive(text: str, stop: list[str], skip: int = 0) -> tuple[str, str | None]:
    """Text before the stop string that ends first behind `skip`, and that stop string."""
    for end in range(skip + 1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@relaxed
@given(texts, stops, st.lists(st.integers(0, 100)), st.booleans())
def test_equals_search_on_whole_text(
    text: str, stop: list[str], cuts: list[int], include: bool
) -> None:
    checker = StopChecker(stop, include)
    result = "".join(checker.feed(piece) for piece in pieces(text, cuts)) + checker.flush()
    expected, matched = naive(text, stop)
    assert checker.matched == matched
    assert result == expected + (matched if include and matched else "")


@relaxed
@given(texts, texts, stops, st.lists(st.integers(0, 100)))
def test_passed_over_text_counts_only_as_a_beginning(
    head: str, tail: str, stop: list[str], cuts: list[int]
) -> None:
    # With the stop strings included nothing is held back; without, `head` may not be cut.
    checker = StopChecker(stop, include_stop_str_in_output=True)
    result = "".join(checker.pass_over(piece) for piece in pieces(head, cuts))
    result += "".join(checker.feed(piece) for piece in pieces(tail, cuts))
    expected, matched = naive(head + tail, stop, skip=len(head))
    assert checker.matched == matched
    assert result == expected + (matched or "")


@relaxed
@given(texts, stops)
def test_holds_back_exactly_what_could_begin_a_stop_string(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    sent = "".join(checker.feed(char) for char in text)
    if checker.matched is None:
        held = text[len(sent) :]
        beginnings = {s[:i] for s in stop for i in range(len(s))}
        longest = max((b for b in beginnings if text.endswith(b)), key=len)
        assert held == longest
        assert checker.flush() == held
        assert checker.flush() == ""


def test_stop_string_across_pieces_is_never_sent() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.feed("Yes.\n") == "Yes."
    assert checker.feed("\nUs") == ""
    assert checker.feed("er: more") == ""
    assert checker.matched == "\n\nUser:"
    assert checker.feed("anything") == "" == checker.flush()


def test_first_to_end_wins_and_the_longest_of_those() -> None:
    checker = StopChecker(["abcd", "bc"])
    assert checker.feed("xabcd") == "xa"
    assert checker.matched == "bc"
    checker = StopChecker(["c", "abc", "bc"])
    assert checker.feed("xabc") == "x"
    assert checker.matched == "abc"


def test_included_stop_string_holds_nothing_back() -> None:
    checker = StopChecker(["END"], include_stop_str_in_output=True)
    assert checker.feed("text E") == "text E"
    assert checker.feed("ND and more") == "ND"
    assert checker.matched == "END"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
