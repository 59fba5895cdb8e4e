"""MarkedTextEncoder against the tokenizer that it stands beside."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models

from engine.errors import RequestError
from engine.tokenizer import control_tokens
from engine.tokenizer.control_tokens import ControlTokens
from engine.tokenizer.marked_text import MarkedTextEncoder
from tests.support.tiny_tokenizers import CORPUS
from tests.unit.tokenizer.tokenizer_kinds import BASIC, CONTROL, KINDS, MARKUP, NAMES, byte_level

CARRIED = Path(__file__).parents[3] / "models" / "manta-small" / "tokenizer.json"
relaxed = settings(max_examples=60, deadline=None)
texts = st.text() | st.sampled_from(CORPUS) | st.text("ab<>|[]/_ \n你é\u0338", max_size=30)


class Pair:
    """A tokenizer and the encoder beside it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.control = ControlTokens(backend)
        self.encoder = MarkedTextEncoder(backend, self.control.names, self.control.marker)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids


@pytest.fixture(scope="module", params=[*KINDS, "carried"])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param != "carried":
        return Pair(KINDS[request.param]())
    if not CARRIED.is_file():
        pytest.skip("models/manta-small isn't there")
    return Pair(tokenizers.Tokenizer.from_file(str(CARRIED)))


def has_name(pair: Pair, text: str) -> bool:
    return any(name.lower() in text.lower() for name in pair.control.names)


@relaxed
@example("ab", [0])
@given(texts, st.lists(st.integers(0, 50), max_size=4))
def test_markers_leave_no_trace(pair: Pair, text: str, places: list[int]) -> None:
    if has_name(pair, text):
        return
    marked = text
    for place in sorted({min(place, len(text)) for place in places}, reverse=True):
        # From the end, so that no marker goes into another.
        marked = marked[:place] + pair.control.marker + marked[place:]
    assert pair.encoder.encode(marked) == pair.encode(text)


@relaxed
@given(st.lists(texts | st.sampled_from(NAMES), max_size=8))
def test_names_without_marker_are_tokens(pair: Pair, pieces: list[str]) -> None:
    text = "".join(pieces)
    if any(token.normalized for token in pair.backend.get_added_tokens_decoder().values()):
        # In other case, such a name is a token only for the tokenizer itself.
        text = text.lower()
    if "lower" in repr(pair.backend.normalizer).lower() and text != text.lower():
        return
    assert pair.encoder.encode(text) == pair.encode(text)


@relaxed
@given(st.lists(st.text(max_size=5) | st.sampled_from([*BASIC, *CONTROL]), max_size=8))
def test_broken_names_are_encoded_as_by_a_tokenizer_that_knows_none(pieces: list[str]) -> None:
    pair = BYTE_LEVEL
    text = "".join(pieces)
    if any(name in text for name in MARKUP):
        return
    expected = WITHOUT_SPECIAL.encode(text, add_special_tokens=False).ids
    assert pair.encoder.encode(pair.control.every.break_names(text)) == expected


BYTE_LEVEL = Pair(byte_level())
WITHOUT_SPECIAL = byte_level()
WITHOUT_SPECIAL.encode_special_tokens = True


def test_a_model_that_cannot_make_the_names_is_shared() -> None:
    """A copy of a large vocabulary would take seconds and hundreds of MB."""
    pair = Pair(byte_level())
    pair.backend.model.dropout = 0.5
    assert pair.encoder._encoder.model.dropout == 0.5
    copied = Pair(KINDS["whole_words"]())
    copied.backend.model.dropout = 0.5
    assert copied.encoder._encoder.model.dropout is None


def test_flags_of_added_tokens_are_kept() -> None:
    backend = byte_level()
    backend.add_special_tokens(
        [
            tokenizers.AddedToken("<|left|>", lstrip=True, normalized=False),
            tokenizers.AddedToken("<|right|>", rstrip=True, normalized=False),
            tokenizers.AddedToken("<|word|>", single_word=True, normalized=False),
        ]
    )
    pair = Pair(backend)
    for text in ("a  <|left|>  b", "a <|right|>  b", "a<|word|>b <|word|> c"):
        assert pair.encoder.encode(text) == pair.encode(text)
        broken = pair.control.every.break_names(text)
        assert pair.backend.decode(pair.encoder.encode(broken)) == text


def test_names_that_merges_make() -> None:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<", "s", ">", "<s", "<s>", "<s><", "a"])}
    merges = [("<", "s"), ("<s", ">"), ("<s>", "<")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>"])
    pair = Pair(backend)
    for text, broken in (("a<s>a", [7, 4, 3, 7]), ("<s><s>", [4, 3, 4, 3])):
        assert pair.encoder.encode(pair.control.every.break_names(text)) == broken
        assert pair.encoder.encode(text) == pair.encode(text)
    # Text that no piece stands for is unknown, as ever.
    assert pair.encoder.encode("x") == pair.encode("x") == [0]


def test_a_tokenizer_that_gives_one_id_twice_is_refused() -> None:
    state: dict[str, Any] = json.loads(KINDS["whole_words"]().to_str())
    vocab = state["model"]["vocab"]
    # An id behind a gap: tokens that are added to a copy would get it too.
    vocab["quick"] = len(vocab) + 3
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    with pytest.raises(ValueError, match="no id of its own"):
        Pair(backend)


def test_without_such_an_encoder_names_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(control_tokens, "MarkedTextEncoder", fail)
    control = ControlTokens(byte_level())
    assert control.encode("hello<|im_end|>")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with pytest.raises(RequestError, match="control token"):
                control.encode(control.every.break_names("hello<|im_end|>"))
    assert len(caplog.records) == 1
