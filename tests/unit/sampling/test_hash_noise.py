"""Sampling noise: reproducible bits, and the statistics that Gumbel-max needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling import hash_noise
from engine.sampling.hash_noise import HashNoise, mix_seed

CPU = torch.device("cpu")
VOCAB = 4096
MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
PUBLISHED = [0.814740002155304, 0.6200811266899109, 0.7323799729347229]
"""u of tokens 0, 1 and 4095 for seed 1234 at position 56."""

torch.set_num_threads(1)


def draw(noise: HashNoise, pairs: list[tuple[int, int]], ids: Tensor | None = None) -> Tensor:
    """u [len(pairs), m] for (seed, position) pairs."""
    seeds = torch.tensor([mix_seed(seed) for seed, _ in pairs])
    keys = noise.row_keys(seeds, torch.tensor([position for _, position in pairs]))
    width = VOCAB if ids is None else ids.shape[-1]
    work = torch.empty((2, len(pairs), width), dtype=torch.int32)
    return noise.uniform(keys, ids, work)


@pytest.fixture(scope="module")
def noise() -> HashNoise:
    return HashNoise(VOCAB, CPU)


@pytest.fixture(scope="module")
def grid(noise: HashNoise) -> np.ndarray:
    """u [16 seeds, 32 positions, VOCAB], seeds and positions as close as they can be."""
    pairs = [(seed, position) for seed in range(16) for position in range(32)]
    return draw(noise, pairs).numpy().reshape(16, 32, VOCAB)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def reference_uniform(seed: int, position: int, token: int) -> np.float32:
    """The definition, one token at a time in Python's integers."""
    z = (position * 0x9E3779B97F4A7C15 + mix_seed(seed)) & MASK64
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = ((z ^ (_signed(z, 64) >> shift)) * multiplier) & MASK64
    low, high = z & MASK32, z >> 32
    x = ((token * 0x9E3779B1) & 0x7FFFFFFF) ^ low
    x = ((x ^ (_signed(x, 32) >> 16)) * 0x7FEB352D) & MASK32
    x ^= high
    x = ((x ^ (_signed(x, 32) >> 15)) * 0x846CA68B) & MASK32
    value = _signed(x | 0x80000001, 32)
    return np.float32(value) * np.float32(-(1.0 - 2.0**-24) * 2.0**-31)


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_bits_equal_the_definition(noise: HashNoise, seed: int, position: int) -> None:
    u = draw(noise, [(seed, position)])[0]
    for token in (0, 1, 2, 777, VOCAB - 1):
        assert u[token].item() == reference_uniform(seed, position, token)


def test_published_bits_stay(noise: HashNoise) -> None:
    """A changed hash would change the replies to old seeds, and between versions of replicas."""
    u = draw(noise, [(1234, 56)])[0]
    assert [u[0].item(), u[1].item(), u[4095].item()] == PUBLISHED


def test_subset_of_tokens_has_the_same_noise(noise: HashNoise) -> None:
    pairs = [(seed, 7 * seed) for seed in range(9)]
    whole = draw(noise, pairs).clone()
    ids = torch.randint(0, VOCAB, (9, 33), generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(noise, pairs, ids), whole.gather(1, ids))
    assert torch.equal(draw(noise, pairs, ids[0]), whole[:, ids[0]])


def test_row_doesnt_depend_on_its_batch_or_on_the_vocabulary(noise: HashNoise) -> None:
    pairs = [(seed, 3 + seed) for seed in range(32)]
    batch = draw(noise, pairs).clone()
    for row in (0, 5, 31):
        assert torch.equal(draw(noise, [pairs[row]])[0], batch[row])
    larger = HashNoise(2 * VOCAB, CPU)
    assert torch.equal(draw(larger, pairs, torch.arange(VOCAB)), batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bits_are_the_same_on_cuda(noise: HashNoise) -> None:
    cuda = torch.device("cuda")
    seeds = torch.tensor([mix_seed(seed) for seed in range(64)])
    positions = torch.arange(64) * 97
    on_cuda = HashNoise(VOCAB, cuda)
    keys = on_cuda.row_keys(seeds.to(cuda), positions.to(cuda))
    work = torch.empty((2, 64, VOCAB), dtype=torch.int32, device=cuda)
    expected = draw(noise, [(seed, 97 * seed) for seed in range(64)])
    assert torch.equal(on_cuda.uniform(keys, None, work).cpu(), expected)


def test_uniforms_and_exponentials_are_finite_and_positive(
    noise: HashNoise, grid: np.ndarray
) -> None:
    assert grid.min() >= 2.0**-31
    assert grid.max() <= 1.0 - 2.0**-24
    keys = noise.row_keys(torch.arange(8), torch.arange(8))
    work = torch.empty((2, 8, VOCAB), dtype=torch.int32)
    minus_e = noise.minus_exponential(keys, None, work)
    assert bool((minus_e < 0).all())
    assert bool(minus_e.isfinite().all())


def test_extreme_words_stay_inside_the_open_interval() -> None:
    """The largest and the smallest hash word, which the grid is unlikely to hold."""
    for word in (-(2**31) + 1, -1):
        u = torch.tensor([word], dtype=torch.int32).to(torch.float32).mul_(hash_noise.SCALE)
        assert 0.0 < u.item() < 1.0
        assert math.isfinite(u.log().item())
        assert u.log().item() < 0.0


def chi_square_z(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Standard score of Pearson's statistic (Wilson-Hilferty)."""
    degrees = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * degrees)
    return ((statistic / degrees) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)


def test_uniform_over_all_and_along_every_axis(grid: np.ndarray) -> None:
    bins = (grid * 4096).astype(np.int64)
    assert abs(chi_square_z(np.bincount(bins.ravel(), minlength=4096), grid.size / 4096)) < 4
    coarse = (grid * 64).astype(np.int64)
    rows = coarse.reshape(512, VOCAB)
    worst = [abs(chi_square_z(np.bincount(row, minlength=64), VOCAB / 64)) for row in rows]
    assert max(worst) < 5
    columns = coarse.reshape(512, VOCAB).T
    worst = [abs(chi_square_z(np.bincount(col, minlength=64), 512 / 64)) for col in columns]
    assert max(worst) < 5.5


def test_every_bit_is_fair(grid: np.ndarray) -> None:
    words = (grid[grid < 0.5] * 2.0**24).astype(np.int64)
    for bit in range(23):
        ones = int(((words >> bit) & 1).sum())
        z = (ones - len(words) / 2) / math.sqrt(len(words) / 4)
        assert abs(z) < 5, bit


def test_pairs_fill_the_unit_square(grid: np.ndarray) -> None:
    """Neighbours along seed, position and token id, as pairs in 64 x 64 cells."""
    cells = (grid * 64).astype(np.int64)
    for axis in range(3):
        first = np.take(cells, range(cells.shape[axis] - 1), axis=axis).ravel()
        second = np.take(cells, range(1, cells.shape[axis]), axis=axis).ravel()
        counts = np.bincount(first * 64 + second, minlength=4096)
        assert abs(chi_square_z(counts, len(first) / 4096)) < 4.5, axis


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16])
def test_no_correlation_at_short_lags(grid: np.ndarray, lag: int) -> None:
    centred = grid.astype(np.float64) - 0.5
    for axis in range(3):
        if lag >= grid.shape[axis]:
            continue
        first = np.take(centred, range(grid.shape[axis] - lag), axis=axis)
        second = np.take(centred, range(lag, grid.shape[axis]), axis=axis)
        correlation = float((first * second).mean() * 12.0)
        assert abs(correlation) * math.sqrt(first.size) < 4.5, axis


def test_no_correlation_between_any_two_rows_or_tokens(grid: np.ndarray) -> None:
    rows = (grid.reshape(512, VOCAB).astype(np.float64) - 0.5) * math.sqrt(12.0)
    between_rows = rows @ rows.T / math.sqrt(VOCAB)
    np.fill_diagonal(between_rows, 0.0)
    assert np.abs(between_rows).max() < 5.5
    tokens = rows[:, :1024]
    between_tokens = tokens.T @ tokens / math.sqrt(512)
    np.fill_diagonal(between_tokens, 0.0)
    assert np.abs(between_tokens).max() < 6.0


def test_no_two_rows_or_tokens_share_their_noise(grid: np.ndarray) -> None:
    rows = np.ascontiguousarray(grid.reshape(512, VOCAB))
    assert len({row.tobytes() for row in rows}) == 512
    assert len({column.tobytes() for column in rows.T}) == VOCAB


def test_seeds_of_any_kind_give_different_rows(noise: HashNoise) -> None:
    """Also seeds one step of the position's multiplier apart, and both ends of the range."""
    golden = _signed(0x9E3779B97F4A7C15, 64)
    seeds = [0, 1, -1, golden, golden + 1, 2**32, 2**63 - 1, -(2**63)]
    rows = draw(noise, [(seed, position) for seed in seeds for position in (0, 1, 2**32, 2**33)])
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_gumbel_max_frequencies_are_the_softmax(noise: HashNoise, spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    size, draws = 32, 40000
    logits = torch.randn(size, generator=generator) * spread
    probs = torch.softmax(logits.double(), 0).numpy()
    keys = noise.row_keys(torch.full((draws,), mix_seed(11)), torch.arange(draws))
    work = torch.empty((2, draws, size), dtype=torch.int32)
    minus_e = noise.minus_exponential(keys, torch.arange(size) * 31, work)
    exponential = torch.softmax(logits, 0) / minus_e
    winners = exponential.argmin(1)
    gumbel = (logits - torch.log(-minus_e.double())).argmax(1)
    assert (winners != gumbel).sum().item() <= 1
    counts = np.bincount(winners.numpy(), minlength=size)
    assert abs(chi_square_z(counts, probs * draws)) < 4
