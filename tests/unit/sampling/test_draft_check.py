"""Which drafts are kept, and that sampling behind drafts is sampling behind output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import RowParams
from engine.sampling.draft_check import DraftCheck, draft_check
from engine.sampling.sampler import HostTokens, SampledTokens, Sampler
from engine.sampling.state import SamplingState
from engine.worker.speculation import runs_of
from tests.support.verify_steps import ints, verify_batch

VOCAB = 40
CPU = torch.device("cpu")


@given(
    st.lists(st.integers(1, 3), max_size=3),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5),
    st.data(),
)
def test_kept_is_everything_up_to_the_first_difference(
    extends: list[int], rows: list[list[int]], data: st.DataObject
) -> None:
    batch = verify_batch(extends, rows, [20] * len(rows))
    check = draft_check(batch, CPU)
    sizes = [1] * len(extends) + [len(row) for row in rows]
    sampled = [data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)) for n in sizes]
    expected = []
    for row, tokens in zip([[9]] * len(extends) + rows, sampled, strict=True):
        kept = 1
        while kept < len(row) and tokens[kept - 1] == row[kept]:
            kept += 1
        expected.append(kept)
    flat = torch.tensor([token for tokens in sampled for token in tokens])
    kept = check.num_kept(flat)
    assert kept.tolist() == expected
    flags = [i < n for n, size in zip(expected, sizes, strict=True) for i in range(size)]
    assert check.is_kept(kept).tolist() == flags
    ends = np.cumsum(sizes) - sizes + expected - 1
    assert check.last_kept(kept).tolist() == ends.tolist()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5))
def test_a_device_finds_the_same_as_the_host(rows: list[list[int]]) -> None:
    check = draft_check(verify_batch([], rows, [20] * len(rows)), CPU)
    sampled = torch.tensor([token for row in rows for token in [*row[1:], 1]])
    assert check.num_kept_on_device(sampled).tolist() == check.num_kept(sampled).tolist()


PARAMS = [
    SamplingParams(temperature=0, repetition_penalty=1.4),
    SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.8, presence_penalty=0.4),
    SamplingParams(temperature=0.8, seed=4, top_k=5),
    SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[3], logprobs=2),
]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_sampling_behind_drafts_is_sampling_behind_output(backend: str, seed: int) -> None:
    """The tokens that are kept are those that steps of one token draw; so are the next ones."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 4).tolist()
    logits = torch.from_numpy(rng.normal(0, 3, (12, VOCAB)).astype(np.float32))

    def sampler() -> Sampler:
        state = SamplingState(len(PARAMS) + 1, VOCAB, CPU)
        state.install([RowParams(i, 4, [], p, ints(prompt)) for i, p in enumerate(PARAMS, 1)])
        return Sampler(state, backend)

    def draw(
        one: Sampler, slots: list[int], at: list[int], check: DraftCheck | None = None
    ) -> SampledTokens:
        return one(
            torch.stack([logits[i] for i in at]),
            torch.tensor(slots),
            np.array(slots),
            torch.tensor([4 + i for i in at]),
            None,
            check,
        )

    slots = list(range(1, len(PARAMS) + 1))
    plain, outputs = sampler(), {slot: [prompt[-1]] for slot in slots}
    for i in range(12):
        found = draw(plain, slots, [i] * len(slots)).next_token_ids.tolist()
        for slot, token in zip(slots, found, strict=True):
            outputs[slot].append(token)
    drafting = sampler()
    lens = dict.fromkeys(slots, 0)
    while max(lens.values()) <= 6:
        rows = []
        for slot in slots:
            known = outputs[slot][lens[slot] :][: int(rng.integers(1, 6))]
            rows.append([t if i == 0 or rng.random() < 0.7 else t ^ 1 for i, t in enumerate(known)])
        ends = [4 + lens[slot] + len(row) - 1 for slot, row in zip(slots, rows, strict=True)]
        check = draft_check(verify_batch([], rows, ends), CPU)
        repeated = [s for s, row in zip(slots, rows, strict=True) for _ in row]
        at = [lens[s] + i for s, row in zip(slots, rows, strict=True) for i in range(len(row))]
        sampled = draw(drafting, repeated, at, check)
        assert sampled.num_kept is not None
        tokens = sampled.next_token_ids.tolist()
        first = 0
        for slot, row, count in zip(slots, rows, sampled.num_kept.tolist(), strict=True):
            want = outputs[slot][lens[slot] + 1 :][:count]
            assert tokens[first : first + count] == want, (slot, row)
            first += len(row)
            lens[slot] += count


def test_nan_behind_the_first_difference_fails_nobody() -> None:
    batch = verify_batch([], [[5, 6, 7], [5, 6, 7], [5, 6, 7]], [20] * 3)
    host = HostTokens(
        ints([6, 7, 8, 6, 7, 8, 9, 7, 8]),
        np.array([0, 0, 1, 0, 1, 1, 0, 1, 1], np.bool_),
        None,
        np.array([3, 3, 1]),
    )
    runs = runs_of(batch, host)
    assert runs.tokens == [[6, 7], [6], [9]]
    assert runs.failed == [0, 1]
    assert batch.run_lens.tolist() == [3, 3, 3]
