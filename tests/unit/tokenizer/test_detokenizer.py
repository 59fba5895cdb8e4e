"""Incremental detokenizers against `Tokenizer.decode` of the whole sequence."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer.detokenizer import (
    MAX_HELD_TOKENS,
    ByteLevelDetokenizer,
    IncrementalDetokenizer,
    WindowDetokenizer,
)
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import CORPUS, write_byte_level, write_sentencepiece
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

# Other processes share the cores: no deadline.
relaxed = settings(max_examples=60)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_sentencepiece(tmp_path_factory.mktemp("pieces")))


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.add(token_id) for token_id in ids] + [detokenizer.flush()]


texts = st.text() | st.text("👍🏽👩‍👧你好é€ a\ufffd") | st.sampled_from(CORPUS)
# Beyond the vocabulary, too: models are padded.
ids_lists = st.lists(st.integers(0, 600), max_size=60)


@relaxed
@given(texts, st.booleans())
def test_text_byte_level(byte_level: Tokenizer, text: str, skip: bool) -> None:
    ids = byte_level.encode(text)
    joined = "".join(stream(IncrementalDetokenizer.create(byte_level, skip), ids))
    assert joined == byte_level.decode(ids, skip)
    assert joined.endswith(text)


@relaxed
@given(ids_lists, st.booleans())
def test_any_ids_byte_level(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = ByteLevelDetokenizer(byte_level, skip)
    assert "".join(stream(detokenizer, ids)) == byte_level.decode(ids, skip)


@relaxed
@given(st.binary(max_size=40))
def test_any_bytes_byte_level(byte_level: Tokenizer, data: bytes) -> None:
    by_bytes = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [by_bytes[bytes([byte])] for byte in data]
    joined = "".join(stream(IncrementalDetokenizer.create(byte_level), ids))
    assert joined == byte_level.decode(ids) == data.decode("utf-8", "replace")


@relaxed
@given(texts, st.booleans())
def test_text_sentencepiece(sentencepiece: Tokenizer, text: str, skip: bool) -> None:
    ids = sentencepiece.encode(text)
    joined = "".join(stream(IncrementalDetokenizer.create(sentencepiece, skip), ids))
    assert joined == sentencepiece.decode(ids, skip)


def longest_byte_run(tokenizer: Tokenizer, ids: list[int], skip: bool) -> int:
    visible = [i for i in ids if tokenizer.is_visible(i, skip)]
    runs = groupby(visible, key=lambda i: i in tokenizer.byte_ids)
    return max((len(list(run)) for is_byte, run in runs if is_byte), default=0)


@relaxed
@given(ids_lists, st.booleans())
def test_any_ids_sentencepiece(sentencepiece: Tokenizer, ids: list[int], skip: bool) -> None:
    joined = "".join(stream(WindowDetokenizer(sentencepiece, skip), ids))
    if longest_byte_run(sentencepiece, ids, skip) < MAX_HELD_TOKENS:
        assert joined == sentencepiece.decode(ids, skip)


@relaxed
@given(st.lists(st.binary(max_size=MAX_HELD_TOKENS - 1), max_size=6))
def test_any_bytes_sentencepiece(sentencepiece: Tokenizer, runs: list[bytes]) -> None:
    byte_id = {sentencepiece.token_bytes(i)[0]: i for i in sentencepiece.byte_ids}
    space_a = sentencepiece.encode("a", add_special_tokens=False)
    ids = [i for run in runs for i in [*(byte_id[byte] for byte in run), *space_a]]
    joined = "".join(stream(IncrementalDetokenizer.create(sentencepiece), ids))
    assert joined == sentencepiece.decode(ids)


@relaxed
@given(ids_lists, st.booleans())
def test_window_algorithm_is_right_for_byte_level_too(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    joined = "".join(stream(WindowDetokenizer(byte_level, skip), ids))
    expected = byte_level.decode(ids, skip)
    if longest_partial(byte_level, ids, skip) < MAX_HELD_TOKENS:
        assert joined == expected


def longest_partial(tokenizer: Tokenizer, ids: list[int], skip: bool) -> int:
    """Most tokens in a row that end inside of a character or in an invalid byte."""
    longest = current = 0
    for end in range(1, len(ids) + 1):
        partial = tokenizer.decode(ids[:end], skip).endswith("\ufffd")
        current = current + 1 if partial else 0
        longest = max(longest, current)
    return longest


@relaxed
@given(st.binary(min_size=MAX_HELD_TOKENS, max_size=200))
def test_long_byte_runs_are_not_held_for_ever(sentencepiece: Tokenizer, data: bytes) -> None:
    byte_id = {sentencepiece.token_bytes(i)[0]: i for i in sentencepiece.byte_ids}
    detokenizer = IncrementalDetokenizer.create(sentencepiece)
    texts = stream(detokenizer, [byte_id[byte] for byte in data])
    silent = max(len(list(run)) for empty, run in groupby(texts[:-1], lambda t: not t) if empty)
    assert silent < 2 * MAX_HELD_TOKENS
    valid = data.decode("utf-8", "ignore").encode()
    texts = stream(IncrementalDetokenizer.create(sentencepiece), [byte_id[b] for b in valid])
    assert "".join(texts).encode() == valid.removeprefix(b" ")


RUN = st.tuples(st.text("👍€é a", max_size=20), st.binary(max_size=12))
# Characters, and behind them what may make their run invalid.
RUNS = st.lists(RUN.map(lambda run: run[0].encode() + run[1]), min_size=1, max_size=4)


def rest_of(text: str, data: bytes) -> tuple[str, bytes]:
    """What is left of both where `text` has every byte of `data` once: in a character, or as a
    U+FFFD of its own."""
    while text and data:
        whole = text[0].encode()
        if text[0] == "�":
            whole = data[:1]
        elif not data.startswith(whole):
            break
        text, data = text[1:], data[len(whole) :]
    return text, data


@relaxed
@given(RUNS, RUNS)
def test_runs_of_bytes_between_words(
    sentencepiece: Tokenizer, prompt: list[bytes], runs: list[bytes]
) -> None:
    """However long runs are and wherever they are cut, no byte is lost or shown twice, and the
    words behind them keep their space."""
    byte_id = {sentencepiece.token_bytes(i)[0]: i for i in sentencepiece.byte_ids}
    runs = [run.replace(b"\xef", b"") for run in runs]  # a true U+FFFD has it
    fox = sentencepiece.encode("a fox", add_special_tokens=False)[-1:]
    space_fox = sentencepiece.token_bytes(fox[0]).decode()
    before = [byte_id[byte] for run in prompt for byte in run]
    ids = [i for run in runs for i in [*(byte_id[byte] for byte in run), *fox]]
    whole = sentencepiece.decode([*fox, *ids])[len(sentencepiece.decode(fox)) :]
    joined = "".join(
        stream(IncrementalDetokenizer.create(sentencepiece, True, [*fox, *before]), ids)
    )
    if max(map(len, runs)) < MAX_HELD_TOKENS:
        assert joined == whole
    for run in runs:
        joined, lost = rest_of(joined, run)
        assert not lost and joined.startswith(space_fox)
        joined = joined.removeprefix(space_fox)
    assert joined == ""


# The last one has a true U+FFFD before the place where 8 held tokens are cut.
@pytest.mark.parametrize("text", ["né 👍🏽 你好", "👩‍👩‍👧", "ࠀ\ufffdࠀ"])
def test_characters_come_whole(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas = stream(IncrementalDetokenizer.create(tokenizer), ids)
        assert "".join(deltas) == text
        assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


def test_text_goes_on_from_the_prompt(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("The quick")
    output = sentencepiece.encode("brown fox", add_special_tokens=False)
    assert sentencepiece.decode(output) == "brown fox"
    detokenizer = IncrementalDetokenizer.create(sentencepiece, True, prompt)
    assert "".join(stream(detokenizer, output)) == " brown fox"
    # Behind nothing but bos the text begins, and the decoder drops the space.
    detokenizer = IncrementalDetokenizer.create(sentencepiece, True, prompt[:1])
    assert "".join(stream(detokenizer, output)) == "brown fox"


def test_incomplete_end_is_flushed_once(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🦊", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer.create(byte_level)
    assert [detokenizer.add(i) for i in ids[:-1]][-1] == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["word_level", "word_piece", "metaspace", "byte_level"])
def test_spaces_between_special_tokens(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("fox <s></s> <s>", add_special_tokens=False)
    ids += tokenizer.encode("fox", add_special_tokens=False)
    has_spaces = kind in ("word_level", "word_piece")

    def text(skip: bool, spaces: bool) -> str:
        detokenizer = IncrementalDetokenizer.create(
            tokenizer, skip, spaces_between_special_tokens=spaces
        )
        return "".join(stream(detokenizer, ids))

    for skip in (True, False):
        assert text(skip, True) == tokenizer.decode(ids, skip)
    assert text(True, False) == tokenizer.decode(ids)
    if has_spaces:
        # Only the spaces between special tokens go.
        assert text(False, True) == "fox <s> </s> <s> fox"
        assert text(False, False) == "fox <s></s><s> fox"
    else:
        assert text(False, False) == text(False, True)


@relaxed
@given(texts.filter(bool), st.sampled_from(["byte_level", "sentencepiece"]))
def test_tokens_begin_where_their_text_does(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, kind: str
) -> None:
    """A token within a character begins where the character does."""
    tokenizer = byte_level if kind == "byte_level" else sentencepiece
    prompt = tokenizer.encode("a fox", add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer.create(tokenizer, False, prompt)
    sent = before = 0
    data = b""
    for token_id in ids:
        begin = sent + detokenizer.held_before(token_id)
        assert begin == len(data.decode(errors="ignore")) >= before
        sent += len(detokenizer.add(token_id))
        data, before = data + tokenizer.token_bytes(token_id), begin


@relaxed
@given(ids_lists, st.sampled_from(["byte_level", "sentencepiece"]), st.booleans())
def test_beginnings_never_go_back(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], kind: str, skip: bool
) -> None:
    tokenizer = byte_level if kind == "byte_level" else sentencepiece
    detokenizer = IncrementalDetokenizer.create(tokenizer, skip)
    text, begins = "", []
    for token_id in ids:
        begins.append(len(text) + detokenizer.held_before(token_id))
        text += detokenizer.add(token_id)
    text += detokenizer.flush()
    assert begins == sorted(begins)
    assert all(begin <= len(text) for begin in begins)


def test_a_token_that_is_no_text_begins_where_the_held_character_does(
    sentencepiece: Tokenizer,
) -> None:
    first, second = sentencepiece.encode("𓀀", add_special_tokens=False)[-4:-2]
    detokenizer = IncrementalDetokenizer.create(sentencepiece)
    assert detokenizer.add(first) == ""
    unknown = sentencepiece.vocab_size + 1  # models are padded
    assert [detokenizer.held_before(token_id) for token_id in (unknown, 1, second)] == [0, 0, 0]


def test_a_space_behind_a_prompt_of_bytes_is_kept(sentencepiece: Tokenizer) -> None:
    (word,) = sentencepiece.encode("fox", add_special_tokens=False)[:1]
    for number in (1, 16, 40):
        prompt = sentencepiece.encode("𓀀" * number, add_special_tokens=False)
        prompt = [token for token in prompt if token in sentencepiece.byte_ids]
        assert len(prompt) >= 4 * number
        detokenizer = IncrementalDetokenizer.create(sentencepiece, True, prompt)
        text = detokenizer.add(word) + detokenizer.flush()
        assert text == sentencepiece.token_bytes(word).decode()
        assert text.startswith(" ")
