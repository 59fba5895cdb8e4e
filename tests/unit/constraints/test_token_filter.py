"""Allowed tokens and bad words, alone and together with another constraint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraints import AllOf, Constraint, TokenFilter, mask_words
from engine.constraints.token_choice import TokenChoice
from engine.errors import RequestError
from engine.llm import LLM
from engine.protocol.sampling_params import SamplingParams

VOCAB = 70


def allowed_by(constraint: Constraint) -> set[int]:
    mask = np.full(mask_words(VOCAB), 0xDEADBEEF, np.uint32)
    constraint.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits)}


tokens = st.integers(0, 5) | st.sampled_from([31, 32, 69])
sequences = st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=5)


@settings(max_examples=200, deadline=None)
@given(
    bad=sequences,
    allowed=st.none() | st.sets(tokens, min_size=1),
    choices=st.lists(st.integers(0, 10**6), max_size=30),
)
def test_no_bad_sequence_is_ever_written(
    bad: list[list[int]], allowed: set[int] | None, choices: list[int]
) -> None:
    constraint = TokenFilter(VOCAB, allowed, bad)
    assert constraint.is_static == all(len(sequence) == 1 for sequence in bad)
    output: list[int] = []
    for choice in choices:
        expected = {
            token
            for token in (range(VOCAB) if allowed is None else allowed)
            if not any([*output, token][-len(seq) :] == seq for seq in bad)
        }
        found = allowed_by(constraint)
        assert found == expected
        for token in set(range(VOCAB)) - expected:
            assert not constraint.accept(token)
        if not found:
            return
        token = sorted(found)[choice % len(found)]
        assert constraint.accept(token)
        output.append(token)
    assert not constraint.is_terminated


def test_all_of_allows_what_every_part_allows() -> None:
    parts = [TokenChoice([[1, 2], [1, 3]], {9}), TokenFilter(VOCAB, None, [[1, 2]])]
    both = AllOf(parts, VOCAB)
    assert allowed_by(both) == {1} and both.accept(1)
    assert allowed_by(both) == {3} and not both.is_static
    assert not both.accept(2)


def test_a_static_filter_and_bad_words_with_overlap() -> None:
    with LLM("models/manta-small", dtype="float32", max_total_tokens=4096) as llm:
        prompt = "def main():"
        free = SamplingParams(max_tokens=16, temperature=0)
        base = llm.generate(prompt, free, use_tqdm=False)[0].outputs[0].token_ids
        allowed = sorted(set(base[:4]))
        bad = [base[5:7], [base[9]]]
        params = [
            free,
            SamplingParams(max_tokens=16, temperature=1, seed=1, allowed_token_ids=allowed),
            SamplingParams(max_tokens=16, temperature=0, bad_words_ids=bad),
        ]
        outputs = [
            result.outputs[0].token_ids
            for result in llm.generate([prompt] * 3, params, use_tqdm=False)
        ]
        assert outputs[0] == base
        assert set(outputs[1]) <= set(allowed)
        pairs = list(zip(outputs[2], outputs[2][1:], strict=False))
        assert tuple(bad[0]) not in pairs and base[9] not in outputs[2]
        assert outputs[2][:6] == base[:6]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"bad_words_ids": [[]]}, "bad_words"),
        ({"bad_words_ids": [[VOCAB]]}, "bad_words"),
        ({"bad_words_ids": [[1]] * 5000}, "bad_words"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ],
)
def test_bad_lists_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields).verify(VOCAB)  # type: ignore[arg-type]
    assert caught.value.param == param
