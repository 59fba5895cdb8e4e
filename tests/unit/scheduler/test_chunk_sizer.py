"""Dynamic chunk sizes: equal times where the cost is known, bounds and progress where it isn't."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.messages import AbortRequest
from engine.scheduler.chunk_sizer import MIN_POINTS, WARM_UP, ChunkSizer
from tests.support.scheduler_harness import (
    MODE_IDS,
    MODES,
    VOCAB,
    Harness,
    TimedWorker,
    cost,
    prompt,
)

COSTS = [(2e-9, 2e-5, 1e-3), (1e-8, 2e-5, 0.0), (1e-7, 1e-6, 5e-3), (1e-9, 1e-4, 0.1)]
"""a, b, c in seconds."""


def calibrated(
    coefficients: tuple[float, float, float], base: int, page: int, *, noise: float = 0.0
) -> ChunkSizer:
    """A sizer that has seen ten prompts in its own chunks; some steps are late with `noise`."""
    rng = random.Random(1)
    sizer = ChunkSizer(base, page)
    for _ in range(10):
        left, prefix = rng.randrange(4 * base, 12 * base), 0
        while left:
            n = min(sizer.size_behind(prefix), left)
            late = 8.0 if noise and rng.random() < 0.03 else 1.0 + noise * rng.random()
            sizer.observe(n, prefix, cost(*coefficients, prefix, n) * late)
            prefix, left = prefix + n, left - n
    return sizer


@pytest.mark.parametrize("coefficients", COSTS)
@pytest.mark.parametrize(("base", "page"), [(2048, 16), (512, 1), (512, 256), (96, 48), (64, 16)])
def test_chunks_take_equally_long(
    coefficients: tuple[float, float, float], base: int, page: int
) -> None:
    sizer = calibrated(coefficients, base, page)
    target = cost(*coefficients, 0, sizer.base_size)
    before = sizer.base_size
    for prefix in range(0, 16 * base, page):
        size = sizer.size_behind(prefix)
        assert size <= before, "sizes shrink with the prefix"
        before = size
        if size > sizer.min_size:
            assert cost(*coefficients, prefix, size) <= target * 1.001
        if size < sizer.base_size:
            assert cost(*coefficients, prefix, size + sizer.unit) > target * 0.999
    assert size < sizer.base_size or coefficients[0] * 32 * base < coefficients[1]


@pytest.mark.parametrize("coefficients", COSTS)
def test_noise_and_late_steps_hardly_matter(coefficients: tuple[float, float, float]) -> None:
    exact = calibrated(coefficients, 2048, 16)
    noisy = calibrated(coefficients, 2048, 16, noise=0.1)
    for prefix in range(0, 30000, 1000):
        assert noisy.size_behind(prefix) == pytest.approx(exact.size_behind(prefix), rel=0.15)


def test_the_base_size_until_there_is_enough_to_go_by() -> None:
    sizer = ChunkSizer(512, 16)
    for i in range(WARM_UP):
        sizer.observe(512, 512 * i, 1e3)
    for i in range(MIN_POINTS - 1):
        sizer.observe(512, 512 * i, cost(1e-7, 1e-6, 0.0, 512 * i, 512))
    assert sizer.size_behind(4096) == 512
    sizer.observe(512, 512 * MIN_POINTS, cost(1e-7, 1e-6, 0.0, 512 * MIN_POINTS, 512))
    assert sizer.size_behind(4096) < 512
    assert sizer.fit is not None and sizer.fit.a == pytest.approx(1e-7, rel=1e-3)


@pytest.mark.parametrize(
    "seconds",
    [lambda p, n: 0.01, lambda p, n: 1e-5 * n, lambda p, n: 1.0 / (1 + p), lambda p, n: 1.0 / n],
    ids=["constant", "linear", "faster behind a prefix", "faster when longer"],
)
def test_the_base_size_if_times_do_not_grow_with_the_prefix(seconds: Any) -> None:
    sizer = ChunkSizer(512, 16)
    rng = random.Random(2)
    for i in range(100):
        n, prefix = rng.choice([512, 512, 100]), 512 * (i % 8)
        sizer.observe(n, prefix, seconds(prefix, n))
    assert [sizer.size_behind(p) for p in (0, 1000, 100_000)] == [512] * 3


def test_first_chunks_alone_say_nothing_about_prefixes() -> None:
    sizer = ChunkSizer(512, 16)
    for n in range(16, 513, 4):
        sizer.observe(n, 0, cost(1e-7, 1e-6, 0.0, 0, n))
    assert sizer.fit is None


def test_a_changed_device_is_followed_gradually() -> None:
    sizer = calibrated((1e-7, 1e-6, 0.0), 512, 16)
    followed = []
    for i in range(256):
        sizer.observe(512, 512 * (i % 8), cost(2e-7, 2e-6, 0.0, 512 * (i % 8), 512))
        assert sizer.fit is not None
        followed.append(sizer.fit.a)
    # After half a window the fit itself is in between, and it moves only half way at once.
    assert 1.05e-7 < followed[80] < 1.95e-7
    assert followed[-1] == pytest.approx(2e-7, rel=0.01)


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="base_size"):
        ChunkSizer(15, 16)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 5e-324, 1e-7, 4e3, 1e308, math.inf, math.nan])
def test_times_that_no_step_takes_are_left_out(seconds: float) -> None:
    sizer = calibrated((1e-7, 1e-6, 0.0), 512, 16)
    fit = sizer.fit
    for i in range(32):
        sizer.observe(512, 512 * i, seconds)
    assert sizer.fit == fit


@given(
    page=st.sampled_from([1, 2, 3, 16, 48, 64, 256]),
    pages=st.integers(1, 40),
    rest=st.integers(0, 255),
    points=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 100_000), st.floats()), max_size=60
    ),
    total=st.integers(1, 200_000),
)
@settings(max_examples=150)
def test_whatever_was_observed_sizes_are_in_bounds_and_prompts_end(
    page: int, pages: int, rest: int, points: list[tuple[int, int, float]], total: int
) -> None:
    base = page * pages + rest % page
    sizer = ChunkSizer(base, page)
    for n, prefix, seconds in points:
        sizer.observe(n, prefix, seconds)
    prefix = 0
    while prefix < total:
        size = min(sizer.size_behind(prefix), total - prefix)
        last = prefix + size == total
        assert last or (size % page == 0 and size * 4 >= sizer.base_size)
        assert 0 < size <= base
        prefix += size
    assert prefix == total


def timed(coefficients: tuple[float, float, float], **overrides: Any) -> Harness:
    """A harness whose worker reports times."""
    h = Harness(**{**overrides, "enable_dynamic_chunking": True})
    config = h.config
    h.worker = TimedWorker(
        config.num_kv_tokens + config.engine.page_size,
        config.max_rows,
        config.max_model_len,
        VOCAB,
        coefficients=coefficients,
    )
    return h


def chunks_of(h: Harness) -> list[list[tuple[int, int]]]:
    assert isinstance(h.worker, TimedWorker)
    return h.worker.chunks


LONG: dict[str, Any] = dict(
    num_kv_tokens=8192, max_model_len=2048, chunked_prefill_size=128, page_size=4
)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_the_scheduler_sends_chunks_of_equal_time(mode: dict[str, Any]) -> None:
    coefficients = (2e-7, 1e-5, 1e-4)
    h = timed(coefficients, **mode, **LONG)
    rng = random.Random(3)
    h.add(1, prompt(rng, 2000), 1)
    h.run()
    fixed = len(chunks_of(h))
    h.add(2, prompt(rng, 2000), 1)
    h.run()
    second = [chunks[0] for chunks in chunks_of(h)[fixed:]]
    times = [cost(*coefficients, prefix, n) for n, prefix in second[:-1]]
    sizes = [n for n, _ in second]
    assert sizes[0] == 128 and sizes[-2] == 32
    above_least = [t for t, n in zip(times, sizes, strict=False) if n > 32]
    assert max(above_least) <= 1.001 * times[0]
    assert sum(sizes) == 2000 and [p for _, p in second] == np.cumsum([0, *sizes[:-1]]).tolist()


def test_rows_behind_cached_prefixes_take_more_of_the_step() -> None:
    """Tails behind a long prefix: as tokens they'd fit one step, as time they don't."""
    h = timed((2e-7, 1e-5, 1e-4), **LONG)
    rng = random.Random(4)
    stem = prompt(rng, 1600)
    h.add(1, stem, 1)
    h.run()
    assert h.scheduler.sizer is not None and h.scheduler.sizer.size_behind(1600) == 32
    before = len(chunks_of(h))
    for i in range(5):
        h.add(10 + i, stem + prompt(rng, 12), 1)
    h.run()
    steps = [[n for n, _ in rows] for rows in chunks_of(h)[before:]]
    assert sum(map(sum, steps)) == 5 * 12
    assert max(map(sum, steps)) == 32 and len(steps) == 2


def test_only_steps_of_one_chunk_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    h = timed((2e-7, 1e-5, 1e-4), **LONG)
    seen: list[tuple[int, int]] = []
    assert h.scheduler.sizer is not None
    monkeypatch.setattr(h.scheduler.sizer, "observe", lambda n, p, s: seen.append((n, p)))
    rng = random.Random(5)
    h.add(1, prompt(rng, 500), 30)
    for i in range(2, 6):
        h.add(i, prompt(rng, 30), 5)
    h.run()
    h.add(7, prompt(rng, 300), 4)
    h.run()
    alone = [rows[0] for rows in chunks_of(h) if len(rows) == 1]
    assert seen == alone and len(seen) < len(chunks_of(h))


def test_without_times_the_base_size_stays() -> None:
    h = Harness(**LONG, enable_dynamic_chunking=True)
    h.add(1, prompt(random.Random(6), 2000), 1)
    steps = 0
    while not h.scheduler.is_idle:
        steps += h.step()
    assert steps == -(-2000 // 128)


def test_off_by_default() -> None:
    assert Harness().scheduler.sizer is None


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_storm_with_dynamic_chunks(mode: dict[str, Any], page_size: int) -> None:
    """Aborts, retractions, decode rows beside chunks, shared prefixes: tokens stay right."""
    rng = random.Random(f"{page_size}{mode}")
    h = timed(
        (2e-6, 1e-5, 1e-4),
        **mode,
        page_size=page_size,
        num_kv_tokens=rng.choice([112, 160, 400]),
        chunked_prefill_size=rng.choice([32, 50, 64]),
        enable_mixed_chunk=rng.random() < 0.5,
        schedule_conservativeness=rng.choice([0.01, 1.0]),
    )
    assert h.scheduler.sizer is not None
    for i in range(32):  # steps of one chunk alone are rare in what follows
        h.scheduler.sizer.observe(32, 32 * (i % 3), cost(2e-6, 1e-5, 1e-4, 32 * (i % 3), 32))
    assert h.scheduler.sizer.size_behind(96) < h.scheduler.sizer.base_size
    stems = [prompt(rng, 60) for _ in range(3)]
    for rid in range(60):
        ids = rng.choice(stems)[: rng.randrange(1, 60)] + prompt(rng, rng.randrange(0, 30))
        h.add(rid, ids, rng.randrange(1, 30))
        for _ in range(rng.randrange(6)):
            h.step()
            h.check()
        running = [r for m in h.scheduler.micro_batches for r in m.running.reqs]
        if running and rng.random() < 0.2:
            h.scheduler.requests.retract(rng.choice(running))
        alive = [k for k, r in h.scheduler.requests.by_key.items() if not r.finished]
        if alive and rng.random() < 0.1:
            key = rng.choice(alive)
            h.aborted.add(key)
            h.scheduler.abort(AbortRequest(rid=key[1], reply_to=key[0]))
    h.run()


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_every_prompt_token_is_computed_once(mode: dict[str, Any]) -> None:
    h = timed((2e-7, 1e-5, 1e-4), **mode, **LONG, enable_prefix_cache=False)
    rng = random.Random(7)
    lengths = [rng.randrange(1, 1500) for _ in range(15)]
    for rid, length in enumerate(lengths):
        h.add(rid, prompt(rng, length), 3)
        for _ in range(rng.randrange(12)):
            h.step()
    h.run()
    assert h.scheduler.stats.retractions_total == 0
    assert h.worker.prompt_tokens_run == sum(lengths)
