"""What requests may ask of the sampler: no way to sample forgets one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import RowParams
from engine.sampling.state import SamplingState

VOCAB = 16
ASKED: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "min_tokens": {"min_tokens": 2},
    "stop_token_ids": {"min_tokens": 2, "stop_token_ids": [3]},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "logprobs": {"logprobs": 0},
    "logprob_token_ids": {"logprobs": 0, "logprob_token_ids": [3]},
}
"""By field: values with which a token isn't the likeliest or any of the vocabulary, or isn't all
that is wanted."""
DRAWN = {"top_p", "top_k", "min_p"}
"""Fields of `ASKED` that `SamplingBackend.sample` knows."""
PLAIN = {"n", "max_tokens", "temperature", "seed"}
"""Fields that the plain ways to sample know, or that choose no token."""
BY_MASK = {"allowed_token_ids", "bad_words_ids", "constraint"}
"""Their steps come with masks (`SampleMasks`)."""
OF_TEXT = {
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "thinking",
}
"""The scheduler or the tokenizer minds them, or another part of the step."""


def installed(**fields: Any) -> SamplingState:
    state = SamplingState(2, VOCAB, "cpu")
    params = SamplingParams(seed=1, **fields)
    state.install([RowParams(1, 2, [0], params, np.array([4, 5, 6], np.int32))])
    return state


def test_every_field_is_thought_of() -> None:
    known = ASKED.keys() | PLAIN | BY_MASK | OF_TEXT
    assert known == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", ASKED)
def test_a_plan_with_it_is_not_plain(name: str) -> None:
    state = installed(**ASKED[name])
    assert not state.plan(np.array([1])).is_plain
    assert state.plan(np.array([1])).only_draws == (name in DRAWN)
    assert not state.plan(np.array([0, 1])).is_plain
    assert state.plan(np.array([0])).is_plain, "row 0 asks for nothing"
    state.install([RowParams(1, 2, [0], SamplingParams(seed=1))])
    assert state.plan(np.array([0, 1])).is_plain, "the next request asks for nothing"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_plain_ways(temperature: float) -> None:
    plan = installed(temperature=temperature).plan(np.array([0, 1]))
    assert plan.is_plain and plan.draw.is_greedy == (temperature == 0.0)
