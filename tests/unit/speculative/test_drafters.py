"""What drafters find, against a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import RowParams, RowSpeculation
from engine.speculative import suffix
from engine.speculative.config import SpeculativeConfig
from engine.speculative.ngram import MAX_CANDIDATES, NgramDrafter, NgramIndex
from engine.speculative.prediction import PredictionFollower
from engine.speculative.suffix import SHORTEST, OutputStore, SuffixDrafter

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def slot(number: int, tokens: list[int], namespace: str = "", prompt_len: int = 0) -> RowParams:
    return RowParams(
        number,
        prompt_len or len(tokens),
        [],
        SamplingParams(),
        np.array(tokens, np.int32),
        RowSpeculation(1000, namespace),
    )


def by_hand(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """(length, position) of the longest end of `tokens` among the `MAX_CANDIDATES` latest places
    of its shortest part; of equal ones the latest."""
    best = (0, -1)
    found = 0
    for end in range(len(tokens) - 2, shortest - 2, -1):
        if tokens[end - shortest + 1 : end + 1] != tokens[len(tokens) - shortest :]:
            continue
        length = shortest
        while (
            length < min(longest, end + 1)
            and tokens[end - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        if length > best[0]:
            best = (length, end)
        found += 1
        if found == MAX_CANDIDATES or length == longest:
            break
    return best


@given(TOKENS, st.integers(1, 3), st.integers(3, 6), st.data())
def test_an_index_finds_what_a_search_finds(
    tokens: list[int], shortest: int, longest: int, data: st.DataObject
) -> None:
    """However the tokens came, and whenever they were looked up."""
    index = NgramIndex(shortest, longest)

    def check(known: list[int]) -> None:
        assert index.tokens == known
        found = index.find(index.tokens)
        expected = by_hand(known, shortest, longest) if len(known) >= shortest else (0, -1)
        assert (found.length, found.position) == expected

    at = 0
    while at < len(tokens):
        n = data.draw(st.integers(1, 5))
        index.extend(tokens[at : at + n])
        at += n
        if data.draw(st.booleans()):
            check(tokens[:at])
    check(tokens)
    if len(tokens) >= shortest:
        assert index.before == NgramIndex(shortest, longest, tokens).before


@given(TOKENS, st.integers(1, 8))
def test_drafts_follow_the_match_and_go_on_as_the_text_did(tokens: list[int], count: int) -> None:
    drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
    drafter.install(slot(1, tokens))
    (drafts,) = drafter.propose([1], [count])
    length, position = by_hand(tokens, 2, 5) if len(tokens) >= 2 else (0, -1)
    if not length:
        assert drafts == []
        return
    text = list(tokens)
    for _ in range(count):
        text.append(text[position + 1 + len(text) - len(tokens)])
    assert drafts == text[len(tokens) :]


def test_a_slot_that_is_taken_anew_forgets() -> None:
    drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
    drafter.install(slot(1, [5, 6, 7, 5, 6]))
    assert drafter.propose([1], [1]) == [[7]]
    drafter.install(slot(1, [5, 6]))
    assert drafter.propose([1], [1]) == [[]]


def test_suffix_reads_others_of_its_namespace_only() -> None:
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"))
    drafter.install(slot(1, [1], "a"))
    drafter.observe(1, [10, 11, 12, 13, 14])
    drafter.install(slot(2, [10, 11, 12], "a"))
    drafter.install(slot(3, [10, 11, 12], "b"))
    assert drafter.propose([2, 3], [4, 4]) == [[13, 14], []]
    drafter.install(slot(4, [1, 10, 11, 12, 20, 10, 11, 12], "a"))
    assert drafter.propose([4], [1]) == [[20]], "its own tokens come first"


def test_prompts_are_not_shown_to_others() -> None:
    drafter = SuffixDrafter(SpeculativeConfig(method="suffix"))
    drafter.install(slot(1, [10, 11, 12, 13], "a"))
    drafter.install(slot(2, [10, 11, 12], "a"))
    assert drafter.propose([2], [1]) == [[]]


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12))
def test_a_store_is_bounded_and_forgets_whole_outputs(outputs: list[list[int]]) -> None:
    store = OutputStore(longest=6, max_outputs=3)
    for tokens in outputs:
        store.extend(store.begin(), tokens)
    assert len(store) == min(len(outputs), 3)
    kept = [tokens for tokens in outputs[-3:] if len(tokens) > SHORTEST]
    known = {tuple(t[i : i + SHORTEST]) for t in kept for i in range(len(t) - SHORTEST)}
    assert set(store.latest) <= known
    assert all(number in store.outputs for number in store.latest.values())


def test_all_stores_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_TOKENS", 50)
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=2)
    drafter = SuffixDrafter(config)
    for number in range(80):
        name = f"namespace {number if number < 40 else 40}"
        drafter.install(slot(number % 8, [number], name))
        drafter.observe(number % 8, [number, 1, 2, 3, 4, 5, 6])
        kept = sum(store.num_tokens for store in drafter.stores.values())
        assert kept == drafter.num_tokens <= 50
        found = [len(o.tokens) for s in drafter.stores.values() for o in s.outputs.values()]
        assert sum(found) == kept
    assert len(drafter.stores) <= 10
    drafter.observe(0, [7, 8])  # its output may have been dropped
    drafter.install(slot(1, [5, 6, 7], "x", prompt_len=3))
    embedding = slot(2, [5, 6, 7], "x")
    assert embedding.speculation is not None
    embedding.speculation.max_len = 3
    drafter.install(embedding)
    assert len(drafter.stores["x"]) == 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 9))
def test_a_right_prediction_is_followed_to_its_end(expected: list[int], step: int) -> None:
    follower = PredictionFollower(expected)
    at = 0
    while at < len(expected):
        assert follower.propose(step) == expected[at : at + step]
        follower.observe(expected[at : at + step])
        at += step
    assert follower.propose(step) == []


def test_a_prediction_is_found_again_behind_a_difference() -> None:
    follower = PredictionFollower([1, 2, 3, 4, 5, 6, 7, 8])
    follower.observe([1, 2, 99])
    assert follower.propose(3) == []
    follower.observe([4, 5])
    assert follower.propose(9) == [6, 7, 8]
    resumed = PredictionFollower([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 99, 4, 5])
    assert resumed.propose(9) == [6, 7, 8]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "method is missing; choose one of ngram, suffix, draft_model"),
        ({"method": "medusa"}, "needs draft heads"),
        ({"method": "lookahead"}, "is unknown; choose one of"),
        ({"method": 3}, "is unknown"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "greater than or equal to 1"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "less than or equal to 16"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "is above"),
        ({"method": "ngram", "prompt_lookup": 3}, "prompt_lookup"),
        ({"method": "draft_model"}, "needs model"),
        ({"method": "ngram", "model": "x"}, "no other method"),
    ],
)
def test_what_is_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig.model_validate(keys)


def test_what_is_understood() -> None:
    found = SpeculativeConfig.model_validate({"prompt_lookup_max": 3})
    assert (found.method, found.lookup_min, found.lookup_max) == ("ngram", 2, 3)
    found = SpeculativeConfig.model_validate({"prompt_lookup_max": 1})
    assert (found.lookup_min, found.lookup_max) == (1, 1)
    found = SpeculativeConfig.model_validate({"prompt_lookup_min": 7})
    assert (found.lookup_min, found.lookup_max) == (7, 7)
    assert SpeculativeConfig.model_validate({"model": "folder"}).method == "draft_model"
