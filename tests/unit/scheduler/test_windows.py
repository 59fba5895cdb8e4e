"""Layers with windows, whose room is small: prefixes are found again, and requests run beside each
other as they would with room for all. Their places are checked by `FakeWorker`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduler_harness import VOCAB, Harness

SHARED = [(7 * k + k * k) % VOCAB for k in range(60)]
KEYS: dict[str, Any] = {
    "num_kv_tokens": 1200,
    "window": 16,
    "page_size": 4,
    "max_model_len": 96,
    "swa_full_tokens_ratio": 0.15,
}


def others(count: int, first: int = 0) -> list[list[int]]:
    """Prompts that share nothing."""
    return [
        [(i * i + 3 * k * i + k) % VOCAB for k in range(70)] for i in range(first, first + count)
    ]


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_a_prefix_whose_windows_are_gone_is_made_once(at_once: int) -> None:
    h = Harness(**KEYS, max_running_requests=at_once)
    h.add(0, [*SHARED, 1], 4)
    h.run()
    for number, prompt in enumerate(others(12), 100):
        h.add(number, prompt, 8)
        h.run()
    for number in range(1, 25):
        h.add(number, [*SHARED, number, 2], 32)
    h.run()
    found = [h.cached[("c", number)] for number in range(1, 25)]
    assert found[0] < 60  # what came between needed the room
    assert sum(hit == 60 for hit in found) >= 24 - 2 * at_once


def test_conversations_in_turn_find_their_prompts() -> None:
    """Of several, each of which comes again when the others had their turn."""
    h = Harness(**{**KEYS, "swa_full_tokens_ratio": 0.5}, max_running_requests=1)
    prompts = {number: prompt[:40] for number, prompt in enumerate(others(4))}
    for turn in range(4):
        for number in prompts:
            rid = 10 * turn + number
            h.add(rid, prompts[number], 8)
            h.run()
            if turn:
                assert h.cached[("c", rid)] >= len(prompts[number]) - 12
            prompts[number] = [*prompts[number], *h.tokens[("c", rid)], 5]


def test_requests_take_room_as_they_are_expected_to() -> None:
    """Those that may go on for long, and mostly don't, run beside each other."""
    h = Harness(
        **{**KEYS, "window": 64, "swa_full_tokens_ratio": 0.3},
        max_running_requests=8,
        schedule_conservativeness=0.1,
    )
    windows = h.config.windows
    assert windows is not None
    for number in range(8):
        h.add(number, [number, 3, 1, number], 90, stop=list(range(0, VOCAB, 2)))
    most = 0
    while not h.scheduler.is_idle:
        h.step()
        most = max(most, h.scheduler.snapshot_stats().num_running)
    room = windows.tokens(h.config.num_kv_tokens) - windows.per_step
    assert most >= 6 and most * windows.per_request > room
    h.check_done()


def test_nobody_is_pushed_out_in_vain() -> None:
    """A more important request that the windows of the less important ones don't make room for."""
    h = Harness(
        **{**KEYS, "window": 64, "swa_full_tokens_ratio": 0.01},
        schedule_policy="priority",
        enable_priority_preemption=True,
        max_running_requests=8,
    )
    h.add(0, [*SHARED, 1], 30, ignore_eos=True, priority=0)
    h.step()
    h.add(1, [4, 5], 4, priority=2)
    for _ in range(3):
        h.step()
    h.add(2, others(1, 9)[0], 20, ignore_eos=True, priority=1)
    h.run()
    assert h.scheduler.stats.preemptions_total == 0
