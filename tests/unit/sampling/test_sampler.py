"""The sampler against transformers' logits processors and a float64 draw, and its invariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import RowParams, TokenLogprobs
from engine.registry import SAMPLING_BACKENDS
from engine.sampling.features.penalties import Penalties
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.state import SamplingState
from engine.sampling.torch_backend import CPU_ELEMENTS
from tests.support.sampler_rows import (
    CPU,
    EOS,
    FILTERS,
    PENALTIES,
    VOCAB,
    Row,
    many_rows,
    random_logits,
    reference_logits,
    reference_scores,
    step,
)

torch.set_num_threads(1)


def sample(rows: list[Row], slots: list[int] | None = None) -> SampledTokens:
    """Install `rows` in a fresh sampler and sample them once."""
    slots = list(range(len(rows))) if slots is None else slots
    state = SamplingState(max(slots) + 1, len(rows[0].logits), CPU)
    state.install([row.install(slot) for row, slot in zip(rows, slots, strict=True)])
    return step(Sampler(state), rows, slots)


def check_against_reference(rows: list[Row]) -> None:
    """Each token is the reference's, or one whose score is equal up to float32 rounding."""
    sampled = sample(rows)
    assert not sampled.is_nan.any()
    for row, token in zip(rows, sampled.next_token_ids.tolist(), strict=True):
        scores = reference_scores(row)
        assert scores[token] >= scores.max() - 1e-4, (row.params, token, int(scores.argmax()))


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_mixed_batch_matches_reference(spread: float) -> None:
    check_against_reference(many_rows(64, spread))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_uniform_batch_matches_reference(filters: dict[str, float]) -> None:
    rows = [
        Row(random_logits(seed, 1.5), SamplingParams(temperature=0.8, seed=seed, **filters))
        for seed in range(40)
    ]
    check_against_reference(rows)


@settings(max_examples=60)
@given(
    temperature=st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 17, 100, VOCAB, 10 * VOCAB]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(-(2**63), 2**63 - 1),
    repetition=st.one_of(st.just(1.0), st.floats(0.2, 3.0)),
    presence=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    output=st.lists(st.integers(0, 60), max_size=12),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    row=st.integers(0, 3),
)
def test_any_parameters_match_reference(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    repetition: float,
    presence: float,
    frequency: float,
    output: list[int],
    spread: float,
    row: int,
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    params.verify(VOCAB)
    rows = many_rows(3)
    rows.insert(row, Row(random_logits(seed % 1000, spread), params, output=output))
    check_against_reference(rows)


def test_frequencies_follow_the_filtered_distribution() -> None:
    """Many positions of one request, drawn by the sampler itself."""
    logits = random_logits(1, 1.0, 64)
    for filters in ({}, {"top_p": 0.6}, {"top_k": 8}, {"min_p": 0.2}):
        params = SamplingParams(temperature=0.9, seed=5, **filters)
        state = SamplingState(1, 64, CPU)
        state.install([Row(logits, params).install(0)])
        draws = 4000
        sampled = Sampler(state)(
            logits.repeat(draws, 1),
            torch.zeros(draws, dtype=torch.int64),
            np.zeros(draws, dtype=np.int32),
            torch.arange(draws),
        )
        counts = np.bincount(sampled.next_token_ids.numpy(), minlength=64)
        row = Row(logits, params)
        kept = reference_scores(row).isfinite()
        probs = torch.where(kept, logits.double() / 0.9, -torch.inf).softmax(0).numpy()
        assert counts[probs == 0].sum() == 0
        expected = probs[probs > 0] * draws
        statistic = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
        degrees = len(expected) - 1
        assert abs(statistic - degrees) < 4.5 * np.sqrt(2 * degrees), filters


def test_row_is_independent_of_batch_and_slot() -> None:
    rows = many_rows(32)
    batch = sample(rows).next_token_ids
    for i, row in enumerate(rows):
        assert sample([row]).next_token_ids.item() == batch[i].item()
    shuffled = [rows[(5 * i) % 32] for i in range(32)]
    again = sample(shuffled, slots=[(7 * i + 3) % 32 for i in range(32)]).next_token_ids
    assert torch.equal(again, batch[[(5 * i) % 32 for i in range(32)]])


def test_row_is_independent_of_batch_when_logits_tie() -> None:
    """Logits of a bfloat16 model: many equal ones at the edge of top_k and top_p."""
    rows = many_rows(32)
    for row in rows:
        row.logits = (row.logits * 2.0).round() / 2.0
    batch = sample(rows).next_token_ids
    for i, row in enumerate(rows):
        assert sample([row]).next_token_ids.item() == batch[i].item()


def test_large_batch_is_worked_in_parts() -> None:
    """More rows than a CPU takes at once give what each gives alone."""
    vocab = CPU_ELEMENTS // 4
    rows = many_rows(24, vocab=vocab)
    batch = sample(rows).next_token_ids
    for i, row in enumerate(rows):
        assert sample([row]).next_token_ids.item() == batch[i].item()


def test_nucleus_without_sort_equals_sorted_nucleus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut (winner among all tokens lies in the nucleus) never changes a token."""
    rows = [
        Row(random_logits(i, 1.0), SamplingParams(seed=i, top_p=[0.2, 0.5, 0.9, 0.99][i % 4]))
        for i in range(64)
    ]
    shortcut = sample(rows).next_token_ids
    # A margin of 1 accepts no winner, so every row takes the sorted path.
    monkeypatch.setattr("engine.sampling.torch_backend._MASS_MARGIN", 1.0)
    assert torch.equal(sample(rows).next_token_ids, shortcut)


def test_top_k_takes_lower_ids_first_among_ties() -> None:
    logits = torch.zeros(VOCAB)
    logits[[100, 200, 300, 400]] = 5.0
    found = {
        sample([Row(logits, SamplingParams(seed=seed, top_k=2))]).next_token_ids.item()
        for seed in range(40)
    }
    assert found == {100, 200}


def generate(sampler: Sampler, row: Row, slot: int, count: int) -> None:
    """Append `count` sampled tokens to `row`; the logits differ from step to step."""
    for _ in range(count):
        row.logits = random_logits(row.seq_len, 1.0)
        row.output.append(step(sampler, [row], [slot]).next_token_ids.item())


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reinstall_equals_uninterrupted(penalties: dict[str, float], temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=77, top_p=0.95, min_tokens=12, **penalties
    )
    whole = Row(random_logits(0), params)
    state = SamplingState(4, VOCAB, CPU)
    state.install([whole.install(2)])
    generate(Sampler(state), whole, 2, 24)

    split = Row(random_logits(0), params)
    state.install([split.install(0)])
    sampler = Sampler(state)
    generate(sampler, split, 0, 9)
    # Retracted: another request takes the slot, and the first comes back elsewhere.
    state.install([Row(random_logits(1), params, output=[8, 8, 8]).install(0), split.install(3)])
    generate(sampler, split, 3, 15)
    assert split.output == whole.output


def test_penalties_follow_the_sampled_tokens() -> None:
    """Step by step, the counts on the device are those of the reference."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    )
    logits = random_logits(4, 1.0)
    logits[:20] += 20.0
    row = Row(logits, params, prompt=[int(logits.argmax())])
    state = SamplingState(1, VOCAB, CPU)
    state.install([row.install(0)])
    sampler = Sampler(state)
    for _ in range(40):
        expected = reference_logits(row)[0]
        token = step(sampler, [row], [0]).next_token_ids.item()
        assert expected[token] >= expected.max() - 1e-5
        row.output.append(token)
    assert set(row.output) == set(range(20))


def test_penalty_rows_are_reused_and_the_pool_grows() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    state = SamplingState(16, VOCAB, CPU)
    (penalties,) = (each for each in state.adjustments if isinstance(each, Penalties))
    rows = [Row(random_logits(i), params, output=[i, i + 1]) for i in range(11)]
    for _ in range(3):
        state.install([row.install(i) for i, row in enumerate(rows)])
        assert penalties.counts.shape[0] == 16
    plain = Row(random_logits(0), SamplingParams(temperature=0.0))
    state.install([plain.install(i) for i in range(11)])
    state.install([row.install(i + 5) for i, row in enumerate(rows)])
    assert penalties.counts.shape[0] == 16
    assert penalties.counts.sum().item() >= 22
    tokens = step(Sampler(state), rows, list(range(5, 16))).next_token_ids
    assert torch.equal(tokens, sample(rows).next_token_ids)


def test_slot_forgets_its_former_request() -> None:
    state = SamplingState(1, VOCAB, CPU)
    loaded = SamplingParams(
        temperature=1.0,
        seed=1,
        top_k=3,
        logit_bias={9: 100.0},
        min_tokens=100,
        presence_penalty=2.0,
        logprobs=3,
    )
    plain = Row(random_logits(0), SamplingParams(temperature=0.0))
    plain.logits[EOS] = 50.0
    state.install([Row(plain.logits, loaded).install(0)])
    state.install([plain.install(0)])
    sampled = step(Sampler(state), [plain], [0])
    assert sampled.next_token_ids.item() == EOS
    assert sampled.logprobs is None


def test_min_tokens_masks_eos_and_stop_tokens() -> None:
    logits = random_logits(0)
    logits[EOS], logits[20] = 60.0, 50.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, min_tokens=3, stop_token_ids=[20])
        for done in range(6):
            row = Row(logits, params, output=[1] * done)
            token = sample([row, Row(logits, SamplingParams(temperature=0.0))]).next_token_ids
            assert (token[0].item() in (EOS, 20)) == (done >= 3)
            assert token[1].item() == EOS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(temperature: float) -> None:
    logits = random_logits(0)
    best = int(logits.argmax())
    forced = SamplingParams(temperature=temperature, seed=1, logit_bias={17: 100.0})
    forbidden = SamplingParams(temperature=temperature, seed=1, logit_bias={best: -100.0})
    plain = SamplingParams(temperature=0.0)
    for seq in range(20):
        rows = [Row(logits, params, output=[0] * seq) for params in (plain, forced, forbidden)]
        tokens = sample(rows).next_token_ids.tolist()
        assert tokens[0] == best
        assert tokens[1] == 17
        assert tokens[2] != best


def test_mask_allows_only_its_tokens() -> None:
    rows = many_rows(16)
    state = SamplingState(16, VOCAB, CPU)
    state.install([row.install(i) for i, row in enumerate(rows)])
    mask = torch.zeros((16, VOCAB), dtype=torch.bool)
    mask[:, 40:45] = True
    sampled = step(Sampler(state), rows, list(range(16)), mask)
    assert not sampled.is_nan.any()
    assert set(sampled.next_token_ids.tolist()) <= set(range(40, 45))


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-7}], ids=str
)
def test_narrow_filters_equal_greedy(filters: dict[str, float]) -> None:
    rows = [Row(random_logits(i), SamplingParams(seed=i, **filters)) for i in range(40)]
    greedy = torch.stack([row.logits for row in rows]).argmax(1)
    assert torch.equal(sample(rows).next_token_ids, greedy)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(VOCAB)
    logits[[30, 31, 400]] = 1.0
    for filters in ({"temperature": 0.0, "top_k": 5}, {"temperature": 1.0, "top_k": 1}):
        assert sample([Row(logits, SamplingParams(seed=1, **filters))]).next_token_ids.item() == 30


@pytest.mark.parametrize("bad", ["nan", "minus nan", "inf", "all minus inf"])
def test_bad_logits_flag_their_row_only(bad: str) -> None:
    for filters in FILTERS:
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                temperature=temperature, seed=1, repetition_penalty=1.1, **filters
            )
            rows = [Row(random_logits(i), params) for i in range(3)]
            expected = sample(rows).next_token_ids
            if bad == "all minus inf":
                rows[1].logits = torch.full((VOCAB,), -torch.inf)
            else:
                rows[1].logits[500] = float(bad.replace("minus ", "-"))
            host = sample(rows).to_host()
            assert host.is_nan.tolist() == [False, True, False]
            assert host.next_token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
            assert 0 <= host.next_token_ids[1] < VOCAB


def test_some_minus_inf_logits_are_no_error() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[60:62] = 1.0
    rows = [Row(logits, SamplingParams(seed=i, **FILTERS[i % len(FILTERS)])) for i in range(24)]
    sampled = sample(rows)
    assert not sampled.is_nan.any()
    assert set(sampled.next_token_ids.tolist()) == {60, 61}


def test_logprobs_are_of_the_raw_distribution() -> None:
    wants = [None, 0, 3, 20]
    rows = [
        Row(
            random_logits(i),
            SamplingParams(
                seed=i, top_k=4, temperature=0.5, logit_bias={8: 9.0}, logprobs=wants[i % 4]
            ),
        )
        for i in range(12)
    ]
    host = sample(rows).to_host()
    assert host.logprobs is not None
    assert host.next_token_ids.dtype == np.int32
    for i, (row, token) in enumerate(zip(rows, host.next_token_ids.tolist(), strict=True)):
        count = wants[i % 4]
        exact = row.logits.log_softmax(0)
        expected = None
        if count is not None:
            best = sorted(range(VOCAB), key=lambda t, row=row: (-row.logits[t].item(), t))[:count]
            expected = TokenLogprobs(exact[token].item(), best, exact[best].tolist())
        assert host.logprobs[i] == expected


def test_logprobs_of_ties_are_ordered_by_id() -> None:
    logits = torch.zeros(VOCAB)
    row = Row(logits, SamplingParams(temperature=0.0, logprobs=4))
    host = sample([row]).to_host()
    assert host.logprobs is not None
    assert host.logprobs[0] is not None
    assert host.logprobs[0].top_ids == [0, 1, 2, 3]


def test_listed_tokens_stand_before_the_likeliest() -> None:
    lists: list[list[int] | None] = [None, [5], [9, 0, VOCAB - 1, 9]]
    rows = [
        Row(
            random_logits(i),
            SamplingParams(seed=i, top_k=4, logprobs=i % 4, logprob_token_ids=lists[i % 3]),
        )
        for i in range(9)
    ]
    host = sample(rows).to_host()
    assert host.logprobs is not None
    for i, row in enumerate(rows):
        found, listed = host.logprobs[i], lists[i % 3]
        assert found is not None
        exact = row.logits.log_softmax(0)
        reported = [*(listed or []), *exact.topk(i % 4).indices.tolist()]
        assert found.top_ids == reported
        assert found.top_logprobs == pytest.approx(exact[reported].tolist(), abs=1e-5)


def test_no_logprobs_unless_asked() -> None:
    assert sample([Row(random_logits(0), SamplingParams(seed=1))]).to_host().logprobs is None


@pytest.mark.parametrize("num_top", [0, 5])
def test_prompt_logprobs(num_top: int) -> None:
    """More rows than are worked at once."""
    logits = torch.stack([random_logits(i) for i in range(150)])
    ids = torch.arange(150) * 3
    before = logits.clone()
    entries = Sampler(SamplingState(1, VOCAB, CPU)).prompt_logprobs(logits, ids, num_top).to_host()
    assert torch.equal(logits, before)
    exact = logits.log_softmax(1)
    assert [entry.logprob for entry in entries] == exact[torch.arange(150), ids].tolist()
    own = logits.gather(1, ids[:, None])
    assert [entry.rank for entry in entries] == ((logits > own).sum(1) + 1).tolist()
    for i in (0, 63, 64, 149):
        values, best = exact[i].topk(num_top)
        assert entries[i].top_ids == best.tolist()
        assert entries[i].top_logprobs == values.tolist()


def test_plan_follows_reinstallation() -> None:
    """A kept plan must not outlive the parameters that it was made from."""
    state = SamplingState(2, VOCAB, CPU)
    sampler = Sampler(state)
    rows = [Row(random_logits(i), SamplingParams(temperature=0.0)) for i in range(2)]
    state.install([row.install(i) for i, row in enumerate(rows)])
    first = step(sampler, rows, [0, 1]).next_token_ids
    rows[1].params = SamplingParams(temperature=0.0, logit_bias={5: 100.0})
    state.install([rows[1].install(1)])
    second = step(sampler, rows, [0, 1]).next_token_ids
    assert second.tolist() == [first[0].item(), 5]


def test_install_takes_the_last_of_a_slot_named_twice() -> None:
    state = SamplingState(1, VOCAB, CPU)
    row = Row(random_logits(0), SamplingParams(temperature=0.0, logit_bias={5: 100.0}))
    other = Row(random_logits(0), SamplingParams(seed=1))
    state.install([other.install(0), row.install(0)])
    assert step(Sampler(state), [row], [0]).next_token_ids.item() == 5


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (RowParams(0, 2, [], SamplingParams()), "without a seed"),
        (RowParams(0, 2, [], SamplingParams(seed=1, presence_penalty=1.0)), "token ids"),
        (
            RowParams(0, 2, [], SamplingParams(seed=1, presence_penalty=1.0), np.array([1])),
            "token ids",
        ),
        (
            RowParams(0, 2, [], SamplingParams(seed=1, presence_penalty=1.0), np.array([1, 2, -1])),
            "outside the vocabulary",
        ),
    ],
)
def test_bad_install_is_refused_and_changes_nothing(item: RowParams, message: str) -> None:
    state = SamplingState(1, VOCAB, CPU)
    row = Row(random_logits(0), SamplingParams(temperature=0.0, logit_bias={5: 100.0}))
    state.install([row.install(0)])
    with pytest.raises(ValueError, match=message):
        state.install([item])
    assert step(Sampler(state), [row], [0]).next_token_ids.item() == 5


def test_unknown_backend_is_refused() -> None:
    state = SamplingState(1, VOCAB, CPU)
    with pytest.raises(ConfigError, match=r"sampling_backend.*choose one of cpu, torch, triton"):
        SAMPLING_BACKENDS["magic"](state)
    with pytest.raises(ConfigError):
        Sampler(state, "magic")
