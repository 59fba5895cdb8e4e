"""Sampling by the CPU kernels draws what plain torch draws, whatever the batch and the threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.native.compiler import ISA_FLAGS
from engine.protocol.sampling_params import SamplingParams
from engine.sampling import cpu_backend
from engine.sampling.base import SamplingBackend
from engine.sampling.cpu_backend import CpuSampling
from engine.sampling.features.logprobs import LogprobTensors, compute_logprobs
from engine.sampling.hash_noise import HashNoise, mix_seed
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.state import SamplingState
from engine.sampling.token_order import TokenOrder
from engine.sampling.torch_backend import TorchSampling
from tests.support.kernels import examples, instruction_set, torch_threads
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

LARGE_VOCAB = 40_003
"""Three chunks of the kernel, the last one with a part of a vector."""
VOCABS = [1, 2, 7, 16, 33, 257, 1000, 4096, 5003]


@pytest.fixture(scope="module", params=tuple(ISA_FLAGS))
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The library with each instruction set that the processor and the compiler have."""
    with (
        instruction_set(request.param) as found,
        pytest.MonkeyPatch.context() as patch,
        torch_threads(1),
    ):
        patch.setattr(cpu_backend, "require_kernels", lambda key: found)
        yield found


pytestmark = pytest.mark.usefixtures("kernels")


def sample(rows: list[Row], backend: str = "cpu", threads: int = 1) -> SampledTokens:
    state = SamplingState(len(rows), len(rows[0].logits), CPU)
    state.install([row.install(slot) for slot, row in enumerate(rows)])
    with torch_threads(threads):
        return step(Sampler(state, backend), rows, list(range(len(rows))))


def check_same(rows: list[Row], threads: int = 1) -> None:
    """Equal tokens, or ones that are equally good up to float32 rounding."""
    wanted, found = sample(rows, "torch"), sample(rows, "cpu", threads)
    assert torch.equal(found.is_nan, wanted.is_nan)
    pairs = zip(found.next_token_ids.tolist(), wanted.next_token_ids.tolist(), strict=True)
    for row, (token, other) in zip(rows, pairs, strict=True):
        if token != other:
            scores = reference_scores(row)
            assert abs(scores[token] - scores[other]) < 1e-4, (row.params, token, other)


def plain_rows(logits: Tensor, **params: Any) -> list[Row]:
    """A row for each of `logits` [n, vocab], with seeds of their own."""
    return [
        Row(row, SamplingParams(seed=seed, **params), prompt=[0]) for seed, row in enumerate(logits)
    ]


@pytest.mark.parametrize("spread", [0.1, 0.3, 2.0, 6.0])
def test_mixed_batch(spread: float) -> None:
    check_same(many_rows(96, spread), threads=2)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_uniform_batch(filters: dict[str, float]) -> None:
    logits = torch.stack([random_logits(seed, 1.5) for seed in range(40)])
    check_same(plain_rows(logits, temperature=0.8, **filters))


@examples(60)
@given(
    rows=st.integers(1, 6),
    vocab=st.one_of(st.sampled_from(VOCABS), st.integers(1, 300)),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0]),
    ties=st.booleans(),
    temperature=st.sampled_from([0.0, 1e-5, 0.01, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.one_of(st.sampled_from([-1, 1, 2, 50, 10**6]), st.integers(1, 5100)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(-(2**63), 2**63 - 1),
    threads=st.integers(1, 3),
)
def test_any_shape_and_parameters(
    rows: int,
    vocab: int,
    spread: float,
    ties: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    threads: int,
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    found = []
    for i in range(rows):
        logits = random_logits((seed + i) % 2**31, spread, vocab)
        logits = (logits * 2.0).round() / 2.0 if ties else logits
        found.append(Row(logits, params, prompt=[0] * (i + 1)))
    check_same(found, threads)


@pytest.mark.parametrize("spread", [0.2, 3.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_k": 3000}], ids=str)
def test_large_vocabulary(filters: dict[str, float], spread: float) -> None:
    logits = torch.stack([random_logits(i, spread, LARGE_VOCAB) for i in range(8)])
    check_same(plain_rows(logits, **filters), threads=2)


@pytest.mark.parametrize("filters", [{"top_p": 0.4}, {"top_k": 700}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("order", ["ascending", "descending", "equal", "two values"])
def test_any_order_of_logits(order: str, filters: dict[str, float]) -> None:
    logits = torch.linspace(0.0, 3.0, 5003)
    if order == "descending":
        logits = logits.flip(0)
    elif order == "equal":
        logits = torch.full_like(logits, -1.5)
    elif order == "two values":
        logits = (torch.arange(5003) % 3 == 1).float()
    rows = plain_rows(logits.repeat(12, 1), **filters)
    assert torch.equal(sample(rows).next_token_ids, sample(rows, "torch").next_token_ids)


def test_ties_at_the_edge_of_a_filter_go_to_lower_ids() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[[100, 200, 300, 400]] = 5.0
    for filters in ({"top_k": 2}, {"top_p": 0.3}):
        rows = plain_rows(logits.repeat(60, 1), **filters)
        assert set(sample(rows).next_token_ids.tolist()) == {100, 200}


def test_noise_is_the_same_to_the_bit() -> None:
    """Of equal logits that with the largest u wins."""
    rows, vocab = 64, 4096
    drawn = sample(plain_rows(torch.zeros(rows, vocab))).next_token_ids
    noise = HashNoise(vocab, CPU)
    seeds = torch.tensor([mix_seed(seed) for seed in range(rows)])
    keys = noise.row_keys(seeds, torch.ones(rows, dtype=torch.int64))
    u = noise.uniform(keys, None, torch.empty((2, rows, vocab), dtype=torch.int32))
    assert torch.equal(u.argmax(1), drawn)


@pytest.mark.parametrize("vocab", [3, 17, VOCAB, LARGE_VOCAB])
def test_greedy_takes_the_first_of_equal_logits(vocab: int) -> None:
    first = torch.tensor([0, 1, vocab // 2, vocab - 2, vocab - 1])
    logits = torch.full((len(first), vocab), -3.0)
    for row, token in enumerate(first.tolist()):
        logits[row, token:] = -0.5
    for params in ({"temperature": 0.0}, {"top_k": 1}):
        assert torch.equal(sample(plain_rows(logits, **params)).next_token_ids, first)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("vocab", [17, VOCAB, LARGE_VOCAB])
def test_bad_logits_flag_their_row_only(bad: float, vocab: int) -> None:
    for filters in ({"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}):
        logits = torch.stack([random_logits(i, 1.0, vocab) for i in range(3)])
        expected = sample(plain_rows(logits, **filters)).next_token_ids
        token = vocab - 2
        if bad == -torch.inf:
            logits[1] = bad
        else:
            logits[1, token:] = bad
        sampled = sample(plain_rows(logits, **filters), threads=2)
        assert sampled.is_nan.tolist() == [False, True, False]
        assert sampled.next_token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert 0 <= sampled.next_token_ids[1] < vocab
        if bad != -torch.inf:
            assert sampled.next_token_ids[1] == token


@pytest.mark.parametrize("allowed", [[0], [31], [5, 400], [511]])
def test_forbidden_tokens_are_not_drawn(allowed: list[int]) -> None:
    mask = torch.full((VOCAB,), -torch.inf)
    mask[allowed] = 0.0
    for filters in FILTERS:
        logits = torch.stack([random_logits(i) + mask for i in range(6)])
        rows = plain_rows(logits, **filters)
        assert set(sample(rows).next_token_ids.tolist()) <= set(allowed)
        check_same(rows)


class Step:
    """Mixed rows with their logits; both backends over the same state."""

    def __init__(self, rows: int, vocab: int, spread: float) -> None:
        self.rows = many_rows(rows, spread, vocab)
        self.state = SamplingState(rows, vocab, CPU)
        self.state.install([row.install(slot) for slot, row in enumerate(self.rows)])
        self.logits = torch.stack([row.logits for row in self.rows])

    def draw(self, backend: SamplingBackend, rows: Sequence[int], threads: int) -> list[Tensor]:
        """Tokens, row maxima and log-probabilities of some rows."""
        slots, chosen = torch.tensor(rows), self.logits[list(rows)]
        positions = 7 * slots
        with torch_threads(threads):
            plan = self.state.plan(np.array(rows)).draw
            drawn = backend.sample(chosen, plan, slots, positions)
            found = backend.logprobs(chosen, drawn.token_ids, [5] * len(rows))
        return [*drawn, found.token, found.top_ids, found.top]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all tensors are the same to the last bit."""
    pairs = zip(found, expected, strict=True)
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


@pytest.mark.parametrize(("rows", "vocab"), [(300, VOCAB), (40, 1003), (14, LARGE_VOCAB)])
def test_a_row_is_the_same_in_any_batch_and_with_any_threads(rows: int, vocab: int) -> None:
    batch = Step(rows, vocab, 0.7)
    backend = CpuSampling(batch.state.draw)
    whole = batch.draw(backend, range(rows), 1)
    for threads in (2, 5, 16):
        again = batch.draw(backend, range(rows), threads)
        assert same_bits(again, whole)
    for row in range(0, rows, max(1, rows // 20)):
        for threads in (1, 3):
            alone = batch.draw(backend, [row], threads)
            assert same_bits(alone, [found[row : row + 1] for found in whole])
    shuffled = [(11 * row) % rows for row in range(rows)]
    again = batch.draw(backend, shuffled, 2)
    assert same_bits(again, [found[shuffled] for found in whole])
    tokens = TorchSampling(batch.state.draw)
    assert torch.equal(batch.draw(tokens, range(rows), 1)[0], whole[0])


def check_logprobs(logits: Tensor, num_top: list[int], threads: int = 1) -> LogprobTensors:
    rows, vocab = logits.shape
    ids = torch.arange(rows) * 7 % vocab
    wanted = compute_logprobs(logits, ids, num_top, TokenOrder(vocab, CPU))
    before = logits.clone()
    with torch_threads(threads):
        found = CpuSampling(SamplingState(1, vocab, CPU).draw).logprobs(logits, ids, num_top)
    assert torch.equal(logits, before)
    assert torch.equal(found.top_ids, wanted.top_ids)
    torch.testing.assert_close(found.token, wanted.token, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.top, wanted.top, rtol=1e-6, atol=1e-5)
    assert list(found.num_top) == num_top
    return found


@examples(60)
@given(
    rows=st.integers(1, 5),
    vocab=st.one_of(st.sampled_from(VOCABS), st.integers(1, 300)),
    spread=st.sampled_from([0.0, 0.3, 4.0, 30.0]),
    num_top=st.integers(0, 400),
    ties=st.booleans(),
    forbidden=st.booleans(),
    seed=st.integers(0, 2**20),
    threads=st.integers(1, 3),
)
def test_logprobs(
    rows: int,
    vocab: int,
    spread: float,
    num_top: int,
    ties: bool,
    forbidden: bool,
    seed: int,
    threads: int,
) -> None:
    logits = torch.stack([random_logits(seed + i, spread, vocab) for i in range(rows)])
    if ties:
        logits = logits.round()
    if forbidden:
        logits[:, 1::3] = -torch.inf
    check_logprobs(logits, [num_top // (i + 1) for i in range(rows)], threads)


def test_logprobs_of_a_large_vocabulary() -> None:
    logits = torch.stack([random_logits(i, 4.0, LARGE_VOCAB) for i in range(3)])
    check_logprobs(logits, [20, 0, 3], threads=2)


def test_logprobs_of_bad_logits_are_nan() -> None:
    logits = torch.stack([random_logits(i) for i in range(4)])
    logits[0, 9], logits[1, 500], logits[2] = torch.nan, torch.inf, -torch.inf
    found = CpuSampling(SamplingState(1, VOCAB, CPU).draw).logprobs(
        logits, torch.arange(4), [3, 3, 3, 3]
    )
    assert found.token.isnan().tolist() == [True, True, True, False]
    assert found.top.isnan().all(1).tolist() == [True, True, True, False]
    assert ((found.top_ids >= 0) & (found.top_ids < VOCAB)).all()


def test_bad_arguments_are_refused(kernels: Any) -> None:
    logits, floats, ints = torch.zeros(2, 8), torch.zeros(3, 6), torch.zeros(3, 3).long()
    kinds, slots = torch.zeros(2, dtype=torch.int8), torch.tensor([0, 2])
    kernels.sample(logits, kinds, slots, slots, floats, ints)
    for bad in (
        (logits.double(), kinds, slots, slots, floats, ints),
        (logits.t(), kinds, slots, slots, floats, ints),
        (logits, kinds.long(), slots, slots, floats, ints),
        (logits, kinds, slots + 1, slots, floats, ints),
        (logits, kinds, slots, slots[:1], floats, ints),
        (logits, kinds, slots, slots, floats[:, :2], ints),
    ):
        with pytest.raises(RuntimeError):
            kernels.sample(*bad)
    with pytest.raises(RuntimeError):
        kernels.logprobs(logits, torch.tensor([0, 8]), 1)
    with pytest.raises(RuntimeError):
        kernels.logprobs(logits, torch.tensor([0, 7]), 9)
