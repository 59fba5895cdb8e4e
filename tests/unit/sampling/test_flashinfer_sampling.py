"""Sampling with FlashInfer's filters, over the fake package, draws what plain torch draws."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.protocol.sampling_params import SamplingParams
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.state import SamplingState
from engine.sampling.torch_backend import CPU_ELEMENTS
from tests.support.fake_flashinfer import install
from tests.support.sampler_rows import (
    CPU,
    FILTERS,
    VOCAB,
    Row,
    many_rows,
    random_logits,
    reference_scores,
    step,
)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def sample(rows: list[Row], backend: str) -> SampledTokens:
    state = SamplingState(len(rows), len(rows[0].logits), CPU)
    state.install([row.install(slot) for slot, row in enumerate(rows)])
    return step(Sampler(state, backend), rows, list(range(len(rows))))


def check_same(rows: list[Row]) -> None:
    """Equal tokens, or ones that are equally good up to float32 rounding."""
    wanted = sample(rows, "torch")
    found = sample(rows, "flashinfer")
    assert torch.equal(found.is_nan, wanted.is_nan)
    pairs = zip(found.next_token_ids.tolist(), wanted.next_token_ids.tolist(), strict=True)
    for row, (token, other) in zip(rows, pairs, strict=True):
        if token != other:
            scores = reference_scores(row)
            assert abs(scores[token] - scores[other]) < 1e-4, (row.params, token, other)


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_mixed_batch(spread: float) -> None:
    check_same(many_rows(64, spread))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_uniform_batch(filters: dict[str, float]) -> None:
    check_same(
        [
            Row(random_logits(seed, 1.5), SamplingParams(temperature=0.8, seed=seed, **filters))
            for seed in range(40)
        ]
    )


@settings(max_examples=40)
@given(
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([-1, 2, 17, 100, VOCAB, 10 * VOCAB]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(-(2**63), 2**63 - 1),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
)
def test_any_parameters(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, spread: float
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        check_same([Row(random_logits(seed % 1000, spread), params), *many_rows(3)])


def test_ties_are_broken_by_id() -> None:
    """Logits of a bfloat16 model: many equal ones at the edge of top_k and top_p, where the
    filters alone would keep all of them."""
    rows = many_rows(48)
    for row in rows:
        row.logits = (row.logits * 2.0).round() / 2.0
    wanted = sample(rows, "torch").next_token_ids
    assert torch.equal(sample(rows, "flashinfer").next_token_ids, wanted)
    logits = torch.zeros(VOCAB)
    logits[[100, 200, 300, 400]] = 5.0
    for filters in ({"top_k": 2}, {"top_p": 0.2}, {"top_k": 2, "top_p": 0.9}):
        tied = [Row(logits, SamplingParams(seed=seed, **filters)) for seed in range(40)]
        found = set(sample(tied, "flashinfer").next_token_ids.tolist())
        assert found == set(sample(tied, "torch").next_token_ids.tolist())
        assert found <= {100, 200}


def test_large_batch_is_worked_in_parts() -> None:
    """More rows than are taken at once give what each gives alone."""
    rows = many_rows(24, vocab=CPU_ELEMENTS // 4)
    batch = sample(rows, "flashinfer").next_token_ids
    for i, row in enumerate(rows):
        assert sample([row], "flashinfer").next_token_ids.item() == batch[i].item()


def test_row_is_independent_of_batch() -> None:
    rows = many_rows(32)
    batch = sample(rows, "flashinfer").next_token_ids
    for i, row in enumerate(rows):
        assert sample([row], "flashinfer").next_token_ids.item() == batch[i].item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_flag_their_row_only(bad: float) -> None:
    rows = many_rows(24)
    for row in rows[::2]:
        row.logits = row.logits.clone()
        row.logits[7] = bad
    found = sample(rows, "flashinfer")
    assert found.is_nan.tolist() == [i % 2 == 0 for i in range(24)]
    ids = found.next_token_ids.numpy()
    assert bool(((ids >= 0) & (ids < VOCAB)).all())
    good = sample(rows, "torch").next_token_ids.numpy()
    assert np.array_equal(ids[1::2], good[1::2])


def test_missing_package_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [EngineConfig(attention_backend=word) for word in ("flashinfer-fa3", "torch")]
    assert [choice.kernel_choice("cpu").sampling for choice in choices] == ["flashinfer", "torch"]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="set kernels: torch"):
        Sampler(SamplingState(1, VOCAB, CPU), "flashinfer")
