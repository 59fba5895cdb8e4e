"""`DraftLength` and `StepTimes`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.protocol.step import GenerationBatchResult
from engine.scheduler.draft_length import MAX_PROBE_PAUSE, DraftLength, StepTimes
from engine.speculative.config import SpeculativeConfig


def length(most: int = 8, **more: Any) -> DraftLength:
    return DraftLength(SpeculativeConfig(method="ngram", num_speculative_tokens=most, **more))


Outcome = Callable[[int, int], tuple[list[int], list[int]]]
"""(turn, drafts asked for by each row) -> (tokens that each row gave, drafts that it had)."""


def drive(
    chooser: DraftLength, rows: int, steps: int, outcome: Outcome, seconds: Any = lambda _: 0.01
) -> list[int]:
    """What is chosen over some steps; `seconds` of a step by its tokens if all drafts are found."""
    chosen = []
    for turn in range(steps):
        count = chooser.choose(rows)
        chosen.append(count)
        result = GenerationBatchResult(1, [0] * rows, period_s=seconds(rows * (1 + count)))
        step: Any = SimpleNamespace(
            sampled=[None] * rows, reqs=[None] * rows, num_landed=0, drafts=None, forced={}
        )
        if count:
            step.drafts = (np.arange(rows), np.full(rows, count, np.int32))
            result.num_tokens, result.num_drafts = outcome(turn, count)
        chooser.observe(step, result)
    return chosen


def run(
    chooser: DraftLength, rows: int, acceptance: float, seconds: Any, steps: int, seed: int = 0
) -> list[int]:
    """What is chosen over some steps whose drafts are accepted with a probability."""
    rng = np.random.default_rng(seed)

    def outcome(_: int, count: int) -> tuple[list[int], list[int]]:
        accepted = (rng.random((rows, count)) < acceptance).cumprod(1).sum(1)
        return (accepted + 1).tolist(), [count] * rows

    return drive(chooser, rows, steps, outcome, seconds)


def memory_bound(tokens: int) -> float:
    """Flat up to 16 tokens, then in proportion."""
    return 0.01 * max(1.0, tokens / 16)


@pytest.mark.parametrize(
    ("rows", "acceptance", "low", "high"),
    [
        (1, 0.9, 7, 8),  # drafts cost nothing
        (1, 0.0, 0, 0),
        (8, 0.8, 1, 8),
        (32, 0.3, 0, 0),  # every draft costs as much as a token and gives a third of one
        (32, 0.99, 0, 0),  # and so does one that is nearly always right
        (4, 0.9, 3, 8),  # three are free, and more are worth it
    ],
)
def test_the_number_that_gives_most(rows: int, acceptance: float, low: int, high: int) -> None:
    chosen = run(length(), rows, acceptance, memory_bound, 600)
    late = sorted(chosen[300:])
    assert low <= late[len(late) // 2] <= high, late


def test_it_follows_a_change() -> None:
    chooser = length()
    assert run(chooser, 4, 0.0, memory_bound, 300)[-100:].count(0) > 80
    assert np.median(run(chooser, 4, 0.95, memory_bound, 900)[-200:]) >= 3
    assert run(chooser, 4, 0.0, memory_bound, 300)[-100:].count(0) > 80


def test_drafts_that_are_never_right_cost_little() -> None:
    chosen = run(length(), 32, 0.0, lambda tokens: 1e-4 * tokens, 2000)
    extra = sum(count for count in chosen[100:]) / len(chosen[100:])
    assert extra < 0.04, extra
    assert any(chosen[-MAX_PROBE_PAUSE:]), "it must go on trying"


def test_requests_without_finds_cost_nothing_and_a_find_is_noticed() -> None:
    """Nothing is found for long; then drafts are found, and all are right."""

    def outcome(turn: int, count: int) -> tuple[list[int], list[int]]:
        found = count if turn >= 900 else 0
        return [1 + found], [found]

    asked = drive(length(), 1, 1200, outcome)
    assert sum(count > 0 for count in asked[300:900]) < 20
    assert np.median(asked[1100:]) == 8


def test_chance_finds_of_few_rows_are_not_worth_a_step() -> None:
    """Two of 32 rows find drafts, which are seldom right: they promise less than the margin."""

    def outcome(turn: int, count: int) -> tuple[list[int], list[int]]:
        return [1 + (turn % 2 == 0), *[1] * 31], [count, count, *[0] * 30]

    asked = drive(length(4), 32, 800, outcome)
    assert sum(count > 0 for count in asked[400:]) < 20


def test_rare_finds_of_one_row_are_worth_asking_for() -> None:
    """One step in 20 has drafts, half of which are right; the others cost nothing."""
    rng = np.random.default_rng(0)

    def outcome(turn: int, count: int) -> tuple[list[int], list[int]]:
        found = count if turn % 20 == 0 else 0
        return [1 + int((rng.random(found) < 0.5).cumprod().sum())], [found]

    asked = drive(length(4), 1, 1200, outcome)
    assert sum(count > 0 for count in asked[600:]) > 400


def test_fixed_is_fixed() -> None:
    chooser = length(5, draft_length="fixed")
    assert set(run(chooser, 64, 0.0, memory_bound, 50)) == {5}


def test_step_times() -> None:
    times = StepTimes()
    assert times.estimate(5) == 0.0
    times.observe(1, 0.010)
    assert times.estimate(50) == 0.010
    assert times.estimate(0.5) == 0.005
    times.observe(33, 0.030)
    assert 0.010 < times.estimate(16) < times.estimate(24) < 0.030
    times.observe(8, 0.002)
    assert times.estimate(8) == 0.010, "a larger step doesn't take less"
    for _ in range(3):
        times.observe(1, 10.0)
    assert times.estimate(1) < 0.05, "an outlier counts little"
