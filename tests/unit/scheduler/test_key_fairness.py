"""What keys do to each other over time: debts, long prompts, keys that come later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.sequence import KeyLimits
from tests.support.scheduler_harness import MODES, VOCAB, Harness

A, B, C = KeyLimits("a"), KeyLimits("b"), KeyLimits("c")


def prompt(rid: int, length: int) -> list[int]:
    """No two begin alike."""
    return [rid % VOCAB, rid // VOCAB % VOCAB, *((rid * 7 + k) % VOCAB for k in range(length - 2))]


def started(h: Harness, first: int, last: int) -> int:
    """Requests with these ids that have a token."""
    return sum(bool(h.tokens[("c", rid)]) for rid in range(first, last))


def test_what_a_key_used_alone_is_no_debt() -> None:
    """A's queue had the engine for itself for long. B's queue gets half from then on, not all."""
    h = Harness(max_running_requests=4)
    for rid in range(400):
        h.add(rid, prompt(rid, 30), 2, key=A)
    while started(h, 0, 400) < 200:
        h.step()
    for rid in range(1000, 1200):
        h.add(rid, prompt(rid, 30), 2, key=B)
    before = started(h, 0, 400)
    while started(h, 1000, 1200) < 60:
        h.step()
    assert started(h, 0, 400) - before >= 30


@pytest.mark.parametrize("limit", [None, 6])
def test_tokens_that_nobody_else_wanted_are_no_debt(limit: int | None) -> None:
    """B only decodes while A has a queue and most rows. Later B has a queue too: halves."""
    h = Harness(max_running_requests=8, num_kv_tokens=1024)
    own = KeyLimits("a", max_running=limit)
    h.add(5000, prompt(5000, 8), 80, key=B)
    h.step()
    for rid in range(400):
        h.add(rid, prompt(rid, 4), 20, key=own)
    for turn in range(600):
        if turn % 70 == 69:
            h.add(5001 + turn, prompt(turn, 8), 80, key=B)
        h.step()
    for rid in range(1000, 1200):
        h.add(rid, prompt(rid, 4), 20, key=B)
    before = started(h, 0, 400)
    while started(h, 1000, 1200) < 60:
        h.step()
    assert started(h, 0, 400) - before >= 20


def test_one_waiting_at_a_time_is_no_way_to_more() -> None:
    """B keeps one long prompt waiting, and sends the next once it is admitted. A has a queue of
    short ones. Both get as many tokens."""
    h = Harness(
        num_kv_tokens=40000,
        max_model_len=4096,
        max_prefill_tokens=4096,
        chunked_prefill_size=-1,
        max_running_requests=16,
    )
    for rid in range(2000):
        h.add(rid, prompt(rid, 100), 1, key=A)
    h.add(9000, prompt(9000, 8), 2000, key=B)
    sent = 0
    for _ in range(150):
        if started(h, 5000, 5000 + sent) == sent:
            h.add(5000 + sent, prompt(sent, 3000), 1, key=B)
            sent += 1
        h.step()
    assert abs(100 * started(h, 0, 2000) - 3000 * started(h, 5000, 5000 + sent)) < 8000


@pytest.mark.parametrize("length", [20, 28])
def test_a_prompt_that_fits_a_step_needn_t_wait_for_a_long_one(length: int) -> None:
    """It is longer than half of a step."""
    h = Harness(num_kv_tokens=1024, max_model_len=700, chunked_prefill_size=32)
    h.add(1, prompt(1, 640), 2, key=A)
    h.step()
    h.add(2, prompt(2, length), 1, key=B)
    for _ in range(5):
        h.step()
        h.check()
    assert ("c", 2) in h.finished and h.scheduler.requests.interactive.chunked is not None
    h.run()


def test_a_prompt_too_long_for_now_holds_up_no_third_key() -> None:
    h = Harness(num_kv_tokens=2048, max_model_len=700, chunked_prefill_size=32)
    h.add(1, prompt(1, 640), 2, key=A)
    h.step()
    h.add(2, prompt(2, 300), 1, key=B)
    h.add(3, prompt(3, 8), 1, key=C)
    for _ in range(5):
        h.step()
    assert ("c", 3) in h.finished
    h.run()


@pytest.mark.parametrize("mode", MODES)
def test_of_two_long_prompts_neither_waits_for_the_whole_other(mode: dict[str, Any]) -> None:
    h = Harness(**mode, num_kv_tokens=4096, max_model_len=1700, chunked_prefill_size=32)
    h.add(1, prompt(1, 1600), 2, key=A)
    h.step()
    h.add(2, prompt(2, 100), 1, key=B)
    for _ in range(20):
        h.step()
        h.check()
    assert ("c", 2) in h.finished and not h.tokens[("c", 1)]
    h.run()
    assert h.worker.prompt_tokens_run == 1700, "nothing is computed twice"


@pytest.mark.parametrize("rows", [1, 8])
def test_a_long_prompt_takes_what_others_can_t_use(rows: int) -> None:
    """B's request has no row, or is too long to go beside it: the chunks stay whole."""
    h = Harness(
        num_kv_tokens=2048,
        max_model_len=700,
        chunked_prefill_size=32,
        max_running_requests=rows,
        enable_prefix_cache=False,
    )
    h.add(1, prompt(1, 640), 1, key=A)
    h.step()
    h.add(2, prompt(2, 300), 1, key=B)
    for _ in range(19):
        h.step()
    assert h.tokens[("c", 1)]
    h.run()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(MODES),
    st.lists(st.integers(2, 90), min_size=2, max_size=4),
    st.sampled_from(["lpm", "fcfs", "priority"]),
    st.booleans(),
)
def test_backlogged_keys_get_equal_prompt_tokens(
    mode: dict[str, Any], lengths: list[int], policy: str, mixed: bool
) -> None:
    """Keys that always have requests waiting are at most a few chunks apart, or what was left of
    steps that nobody else could use. No key finds another's prompts in the cache: each request has
    its own salt."""
    h = Harness(
        **mode,
        num_kv_tokens=2048,
        schedule_policy=policy,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=32,
        max_queued_requests=10_000,
    )
    keys = [KeyLimits(str(i)) for i in range(len(lengths))]
    for i, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        for rid in range(10_000 * i, 10_000 * i + 4000 // length + 1):
            h.add(rid, prompt(rid, length), 1, key=key, salt=str(rid))
    while all(
        (share := h.scheduler.requests.interactive.shares.get(key)) is not None
        and len(share.waiting) > 1
        for key in keys
    ):
        h.step()
    done = [
        length * started(h, 10_000 * i, 10_000 * i + 4000 // length + 1)
        for i, length in enumerate(lengths)
    ]
    assert max(done) >= 3000
    assert max(done) - min(done) <= 512 + 3 * 90 * 8
