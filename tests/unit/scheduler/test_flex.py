"""Flex requests run in what interactive ones leave, and cost these nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.protocol.sequence import KeyLimits
from engine.scheduler import prefill_planner
from engine.scheduler.flex_pace import GROWTH, FlexPace, StepCost, StepWork
from engine.scheduler.scheduler import LAUNCH_LEAD_S
from tests.support.scheduler_harness import MODE_IDS, MODES, Harness, prompt

FIRST_TURNS, TURNS_EACH = 10, 4
"""Turns of the loop in which flex requests have to give their place to interactive ones."""

every_mode = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)


def filled(rng: random.Random, count: int = 12, **overrides: Any) -> Harness:
    """A server whose flex requests have taken all that they get."""
    h = Harness(**overrides)
    for rid in range(1000, 1000 + count):
        h.add(rid, prompt(rng, 30), 60, is_flex=True, ignore_eos=True)
    for _ in range(24):
        h.step()
        h.check()
    return h


def flex_rows(h: Harness) -> int:
    return h.scheduler.snapshot_stats().num_flex_running


@every_mode
def test_interactive_requests_come_first(mode: dict[str, Any]) -> None:
    h = Harness(**mode, max_running_requests=2)
    rng = random.Random(0)
    for rid in range(4):
        h.add(rid, prompt(rng, 8), 2, is_flex=True)
    for rid in range(4, 8):
        h.add(rid, prompt(rng, 8), 2)
    h.run()
    ends = [rid for _, rid in h.finished]
    assert set(ends[:4]) == {4, 5, 6, 7}


@every_mode
def test_a_row_stays_free_for_interactive_requests(mode: dict[str, Any]) -> None:
    h = filled(random.Random(1), num_kv_tokens=4096, **mode)
    assert flex_rows(h) == h.scheduler.kv.rows.size - 1
    retracted = h.scheduler.stats.flex_retractions_total
    h.add(1, prompt(random.Random(2), 8), 2)
    while ("c", 1) not in h.finished:
        h.step()
    assert h.scheduler.stats.flex_retractions_total == retracted
    h.run()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_small_server_takes_flex_requests(rows: int) -> None:
    h = Harness(max_running_requests=rows)
    for rid in range(4):
        h.add(rid, prompt(random.Random(rid), 8), 8, is_flex=True)
    h.step()
    assert flex_rows(h) == 1
    h.run()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(0, 2**16),
    st.sampled_from([-1, 16, 32]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([256, 1024]),
)
@example(MODES[3], 13199, 16, True, False, 256)  # lacks KV room
@example(MODES[0], 39511, 32, True, True, 1024)  # lacks rows
def test_no_interactive_request_waits_for_what_flex_requests_hold(
    mode: dict[str, Any], seed: int, chunk: int, mixed: bool, cache: bool, num_kv_tokens: int
) -> None:
    """Neither for rows nor for KV room, though more than the reserve come at once."""
    rng = random.Random(seed)
    h = filled(
        rng,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
        enable_prefix_cache=cache,
        max_prefill_tokens=96,
        num_kv_tokens=num_kv_tokens,
        **mode,
    )
    count = rng.randrange(1, 7)
    for rid in range(count):
        h.add(rid, prompt(rng, rng.randrange(8, 40)), 8, ignore_eos=True)
    for _ in range(FIRST_TURNS + count * TURNS_EACH):
        h.step()
        h.check()
    waiting = h.scheduler.requests.interactive.shares.num_waiting
    assert not waiting or not flex_rows(h)
    h.run()
    assert h.scheduler.snapshot_stats().num_flex_running == 0


@every_mode
def test_a_flex_prompt_in_chunks_holds_up_nobody(mode: dict[str, Any]) -> None:
    h = Harness(**mode, num_kv_tokens=2048, max_model_len=900)
    rng = random.Random(3)
    h.add(1, prompt(rng, 800), 2, is_flex=True)
    for _ in range(3):
        h.step()
    h.add(2, prompt(rng, 100), 1)
    for _ in range(12):
        h.step()
    assert ("c", 2) in h.finished and ("c", 1) not in h.finished
    h.run()


@every_mode
def test_an_interactive_request_gets_its_tokens_as_without_flex_ones(mode: dict[str, Any]) -> None:
    """It has a token in every turn, though flex requests run out of room."""
    h = filled(random.Random(4), **mode)
    h.add(1, prompt(random.Random(5), 20), 60, ignore_eos=True)
    while not h.tokens[("c", 1)]:
        h.step()
    turns = 0
    while ("c", 1) not in h.finished:
        h.step()
        turns += 1
    assert turns <= 60 * max(1, h.config.num_micro_batches) + FIRST_TURNS
    h.run()


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(MODES), st.integers(0, 2**16), st.sampled_from([1, 4]))
def test_flex_requests_evict_nothing_of_the_protected_half(
    mode: dict[str, Any], seed: int, page: int
) -> None:
    """What interactive requests left in the prefix cache is there afterwards."""
    rng = random.Random(seed)
    h = Harness(**mode, num_kv_tokens=512, page_size=page)
    prompts = [prompt(rng, 48) for _ in range(5)]
    for rid, ids in enumerate(prompts):
        h.add(rid, ids, 1)
    h.run()
    for rid in range(100, 120):
        h.add(rid, prompt(rng, rng.randrange(20, 60)), rng.randrange(1, 30), is_flex=True)
    h.run()
    for rid, ids in enumerate(prompts):
        h.add(1000 + rid, ids, 1)
    h.run()
    assert all(h.cached[("c", 1000 + rid)] == 48 - page for rid in range(5))


def test_what_flex_requests_left_is_evicted_first() -> None:
    h = Harness(num_kv_tokens=256)
    rng = random.Random(6)
    old, flex = prompt(rng, 64), prompt(rng, 64)
    h.add(1, old, 1)
    h.run()
    h.add(2, flex, 1, is_flex=True)
    h.run()
    h.add(3, prompt(rng, 80), 8)  # needs room of somebody's
    h.add(4, prompt(rng, 80), 8)
    h.run()
    tree = h.scheduler.kv.tree
    assert len(tree.match_prefix(np.asarray(old, np.int32)).indices) == 64
    assert len(tree.match_prefix(np.asarray(flex, np.int32)).indices) < 64


def test_what_flex_requests_use_gets_no_younger() -> None:
    """Of two prefixes that interactive requests left, the one that they left first goes first,
    though a flex request has used it since."""
    h = Harness(num_kv_tokens=256)
    rng = random.Random(11)
    old, young = prompt(rng, 64), prompt(rng, 64)
    h.add(1, old, 1)
    h.run()
    h.add(2, young, 1)
    h.run()
    h.add(3, old[:40], 1, is_flex=True)
    h.run()
    h.scheduler.kv.tree.evict(64)
    tree = h.scheduler.kv.tree
    assert len(tree.match_prefix(np.asarray(young, np.int32)).indices) == 64


def test_an_interactive_request_is_not_retracted_for_flex_ones() -> None:
    """Room runs out while all decode: flex requests leave, whatever their priority."""
    h = Harness(num_kv_tokens=160, page_size=16, schedule_conservativeness=0.01)
    rng = random.Random(12)
    for rid in range(2, 5):
        h.add(rid, prompt(rng, 20), 70, is_flex=True, priority=-5)
    h.step()
    h.add(1, prompt(rng, 30), 60, priority=5)
    while ("c", 1) not in h.finished:
        h.step()
        h.scheduler.pace.cost = StepCost(64.0, 0.0, 0.0)  # so that none pauses
    assert h.scheduler.stats.retractions_total == 0
    assert h.scheduler.stats.flex_retractions_total > 0
    h.run()


def test_what_an_interactive_request_used_is_no_longer_flex() -> None:
    h = Harness(num_kv_tokens=256)
    ids = prompt(random.Random(7), 64)
    h.add(1, ids, 1, is_flex=True)
    h.run()
    assert h.scheduler.kv.tree.evictable_flex_size >= 64
    h.add(2, ids[:40], 1)
    h.run()
    assert h.scheduler.kv.tree.evictable_flex_size <= 24 + h.config.engine.page_size


def test_queues_are_counted_apart() -> None:
    h = Harness(max_queued_requests=4)
    for rid in range(5):
        h.add(rid, [1, 2, 3], 1, is_flex=True)
    h.collect()
    assert h.finished[("c", 4)].status == 429
    limits = KeyLimits("k", max_running=1)
    for rid in range(10, 14):
        h.add(rid, [1, 2, 3], 1, key=limits)
    h.collect()
    assert not any(("c", rid) in h.finished for rid in range(10, 14))
    h.run()


@every_mode
def test_keys_share_what_is_left(mode: dict[str, Any]) -> None:
    h = Harness(**mode, num_kv_tokens=1024, max_queued_requests=1000)
    rng = random.Random(8)
    for rid in range(200):
        key = KeyLimits("a" if rid < 150 else "b")
        h.add(rid, prompt(rng, 16), 1, key=key, is_flex=True)
    while len(h.finished) < 80:
        h.step()
    assert sum(rid >= 150 for _, rid in h.finished) >= 25
    h.run()


def test_retracted_flex_requests_don_t_change_estimates_for_others() -> None:
    h = Harness(schedule_conservativeness=0.01)
    rng = random.Random(9)
    for rid in range(20):
        h.add(rid, prompt(rng, 20), 60, is_flex=True)
    before = h.scheduler.requests.interactive.ratio.value
    while not h.scheduler.stats.flex_retractions_total:
        h.step()
    assert h.scheduler.requests.interactive.ratio.value <= before
    assert h.scheduler.requests.flex.ratio.value > before
    assert not h.scheduler.stats.retractions_total
    h.run()


# --- long prompts


class Crowded:
    """A server with two interactive requests at any time, whose prefixes fill the cache."""

    def __init__(self, **overrides: Any) -> None:
        self.h = Harness(num_kv_tokens=1024, max_model_len=900, max_queued_requests=99, **overrides)
        self.rng, self.next_rid = random.Random(13), 10_000
        self.running: list[int] = []
        self.run(lambda: self.h.scheduler.kv.allocator.available_size() < 64)

    def run(self, until: Callable[[], bool], turns: int = 1000) -> None:
        for _ in range(turns):
            if until():
                return
            self.running = [rid for rid in self.running if ("c", rid) not in self.h.finished]
            while len(self.running) < 2:
                ids = prompt(self.rng, self.rng.randrange(20, 40))
                self.h.add(self.next_rid, ids, self.rng.randrange(10, 30), ignore_eos=True)
                self.running.append(self.next_rid)
                self.next_rid += 1
            self.h.step()
            self.h.check()
        raise AssertionError("no end in sight")

    def add(self, rid: int, length: int, name: str, max_tokens: int = 4) -> None:
        self.h.add(rid, prompt(self.rng, length), max_tokens, key=KeyLimits(name), is_flex=True)

    def are_done(self, *rids: int) -> bool:
        return all(("c", rid) in self.h.finished for rid in rids)


@every_mode
@pytest.mark.parametrize("length", [440, 880])
def test_a_long_flex_prompt_holds_up_no_small_ones(mode: dict[str, Any], length: int) -> None:
    crowded = Crowded(**mode)
    crowded.add(1, length, "a")
    for rid in range(2, 22):
        crowded.add(rid, 20, "b")
    crowded.run(lambda: crowded.are_done(*range(2, 22)))
    assert not crowded.are_done(1)
    crowded.h.run()


@every_mode
def test_a_long_flex_prompt_runs_in_the_end(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though small ones come all the time, which are done meanwhile, too."""
    monkeypatch.setattr(prefill_planner, "LONG_WAIT_STEPS", 64)
    crowded, done = Crowded(**mode), 0

    def is_done() -> bool:
        nonlocal done
        while crowded.are_done(100 + done):
            done += 1
            crowded.add(107 + done, 30, "b", max_tokens=crowded.rng.randrange(20, 60))
        return crowded.are_done(1)

    crowded.add(1, 724, "a", max_tokens=20)
    for rid in range(100, 108):
        crowded.add(rid, 30, "b", max_tokens=8 * (rid - 99))
    crowded.run(is_done)
    assert done
    assert not crowded.h.scheduler.stats.flex_retractions_total
    crowded.h.run()


@pytest.mark.parametrize("mode", MODES[:3], ids=MODE_IDS[:3])
def test_a_flex_prompt_that_interactive_requests_find_in_chunks_comes_to_its_end(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began alone, so that nothing was protected from it; now there is."""
    monkeypatch.setattr(prefill_planner, "LONG_WAIT_STEPS", 64)
    crowded = Crowded(**mode)
    crowded.h.run()
    crowded.add(1, 700, "a")
    while crowded.h.scheduler.requests.flex.chunked is None:
        crowded.h.step()
    crowded.run(lambda: crowded.are_done(1))
    assert not crowded.h.scheduler.stats.flex_retractions_total
    crowded.h.run()


# --- the pace


def measured(base: float, token: float, context: float) -> FlexPace:
    """A pace that knows a device with these costs."""
    pace, rng = FlexPace(), random.Random(0)
    for _ in range(64):
        work = StepWork(rng.randrange(1, 400), rng.randrange(400, 40_000))
        pace.observe(work, base + token * work.num_tokens + context * work.num_context)
    return pace


@pytest.mark.parametrize("cost", [(0.01, 2e-5, 4e-8), (0.01, 0.0, 0.0), (0.0, 1e-3, 0.0)])
def test_the_cost_of_steps_is_learned(cost: tuple[float, float, float]) -> None:
    found = measured(*cost).cost
    for work in (StepWork(1, 500), StepWork(300, 2000), StepWork(64, 30_000)):
        expected = cost[0] + cost[1] * work.num_tokens + cost[2] * work.num_context
        assert found.of(work) == pytest.approx(expected, rel=0.02)


def test_flex_work_fills_steps_up_to_the_slow_ones() -> None:
    pace = measured(0.01, 2e-5, 0.0)
    decode, chunk = StepWork(8, 0), StepWork(512, 0)
    for step in range(128):
        pace.launched(decode if step % 10 else chunk)
    assert pace.allowance(decode) == pytest.approx(0.02024 - 0.01016, rel=0.05)
    assert pace.allowance(chunk) == pytest.approx((GROWTH - 1) * 0.02024, rel=0.05)


def test_beside_decodes_alone_steps_hardly_grow() -> None:
    pace = measured(0.01, 2e-5, 0.0)
    decode = StepWork(8, 0)
    for _ in range(128):
        pace.launched(decode)
    assert pace.allowance(decode) == pytest.approx((GROWTH - 1) * 0.01016, rel=0.05)


def test_without_interactive_requests_there_is_no_limit() -> None:
    pace = measured(0.01, 2e-5, 0.0)
    assert pace.allowance(StepWork(0, 0)) == math.inf
    pace.launched(StepWork(8, 0))
    assert pace.allowance(StepWork(0, 0)) < math.inf
    for _ in range(200):
        pace.launched(StepWork(0, 0))
    assert pace.allowance(StepWork(0, 0)) == math.inf


def test_flex_rows_pause_beside_interactive_ones() -> None:
    """Until steps were measured a step costs as much as 64 tokens: 7 rows may go beside one."""
    h = Harness(num_kv_tokens=8192, max_running_requests=64, chunked_prefill_size=256)
    rng = random.Random(10)
    for rid in range(100, 150):
        h.add(rid, prompt(rng, 4), 60, is_flex=True, ignore_eos=True)
    for _ in range(5):
        h.step()
    running = h.scheduler.micro_batches[0].running
    assert running.num_flex == 50
    h.add(1, prompt(rng, 4), 40, ignore_eos=True)
    while len(h.tokens[("c", 1)]) < 2:
        h.step()
    assert running.num_flex < 10 and flex_rows(h) == 50
    h.run()


def test_a_step_follows_one_with_flex_work_shortly_before_its_end() -> None:
    """Not at once: an interactive request that comes meanwhile would wait for two."""
    h = Harness(lookahead=2)
    rng = random.Random(5)
    h.add(1, prompt(rng, 8), 40, ignore_eos=True)
    h.add(2, prompt(rng, 8), 40, is_flex=True, ignore_eos=True)
    for _ in range(6):
        h.step()
    while h.scheduler.num_in_flight:
        h.process()
    scheduler = h.scheduler
    scheduler.pace.cost = StepCost(0.010, 0.0, 0.0)
    began = h.now + 1.0

    def launches(at: float) -> bool:
        batch = scheduler.next_batch(at)
        if batch is not None:
            h.worker.launch(batch)
        return batch is not None

    assert launches(began)
    assert not launches(began)
    assert scheduler.launch_at == pytest.approx(began + 0.010 - LAUNCH_LEAD_S)
    assert not launches(began + 0.007)
    assert launches(scheduler.launch_at or 0.0)
    assert not launches(began + 0.009) and scheduler.launch_at is None
    h.process()
    assert not launches(began + 0.010)
    assert scheduler.launch_at == pytest.approx(began + 0.020 - LAUNCH_LEAD_S)
    h.run()
