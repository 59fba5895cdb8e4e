"""Fair shares: keys take turns by tokens, none runs more than it may, none waits for another's
queue."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.sequence import KeyLimits
from engine.scheduler.key_shares import MAX_DECODE_DEBT, QUANTUM, KeyShares
from engine.scheduler.req import Req
from tests.support.scheduler_harness import MODES, VOCAB, Harness

A, B, C = KeyLimits("a"), KeyLimits("b"), KeyLimits("c")


def prompt(rid: int, length: int) -> list[int]:
    """No two begin alike."""
    return [rid % VOCAB, rid // VOCAB % VOCAB, *((rid * 7 + k) % VOCAB for k in range(length - 2))]


def waiting(h: Harness, key: KeyLimits) -> int:
    share = h.scheduler.requests.interactive.shares.get(key)
    return 0 if share is None else len(share.waiting)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
def test_a_long_queue_holds_nobody_up(mode: dict[str, Any], policy: str) -> None:
    """200 requests of A wait. B's are admitted as soon as there is a row, each time."""
    h = Harness(**mode, schedule_policy=policy, max_running_requests=8)
    limited = KeyLimits("a", max_running=6)
    for rid in range(200):
        h.add(rid, prompt(rid, 20), 10, key=limited)
    for _ in range(30):
        h.step()
    for rid in range(1000, 1010):
        assert waiting(h, limited) > 60
        h.add(rid, prompt(rid, 8), 1, key=B)
        for _ in range(3 * 4):  # chunks of 16 tokens, and steps in flight
            h.step()
            h.check()
        assert ("c", rid) in h.finished
    h.run()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(2, 40),
    st.integers(2, 40),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from(["lpm", "fcfs", "priority"]),
)
def test_two_keys_share_tokens(
    mode: dict[str, Any], of_a: int, of_b: int, out_a: int, out_b: int, policy: str
) -> None:
    """Keys with requests of other sizes get as many tokens, to within a turn and what runs."""
    h = Harness(
        **mode, schedule_policy=policy, max_running_requests=8, num_kv_tokens=1024, eos_token_ids=()
    )
    keys: dict[int, KeyLimits] = {}
    for rid in range(0, 800, 2):
        for key, at, length, tokens in ((A, rid, of_a, out_a), (B, rid + 1, of_b, out_b)):
            keys[at] = key
            h.add(at, prompt(at, length), tokens, key=key, ignore_eos=True)
    while waiting(h, A) > 20 and waiting(h, B) > 20 and sum(map(len, h.tokens.values())) < 2000:
        h.step()
    h.check()
    admitted = {
        key: sum(
            (of_a if key is A else of_b) + len(h.tokens[("c", rid)])
            for rid, own in keys.items()
            if own is key and h.tokens[("c", rid)]
        )
        for key in (A, B)
    }
    slack = 2 * QUANTUM + 8 * (max(of_a, of_b) + max(out_a, out_b))
    assert abs(admitted[A] - admitted[B]) <= slack


def test_a_lone_key_is_never_held_up() -> None:
    """It owes much, and still its requests go on as if there were no keys."""
    alone, plain = Harness(), Harness()
    for rid in range(20):
        alone.add(rid, prompt(rid, 30), 10, key=A)
        plain.add(rid, prompt(rid, 30), 10)
    while not plain.scheduler.is_idle:
        assert plain.step() == alone.step()
        assert plain.tokens == alone.tokens
    assert alone.scheduler.is_idle


def test_an_idle_key_saves_nothing_and_owes_nothing() -> None:
    shares = KeyShares()
    first, second = req(1, A), req(2, A)
    shares.add(first)
    shares.add(req(3, B))
    shares.charge(shares.of(first), 10_000)
    shares.forget_waiting([first])
    assert shares.get(A) is None
    shares.add(second)
    assert shares.of(second).credit == QUANTUM


def test_turns() -> None:
    """By tokens, not by requests; a debt of many rounds is paid at once."""
    shares = KeyShares()
    for i in range(40):
        shares.add(req(i, A, 64))
        shares.add(req(100 + i, B, 1024))
    order = []
    for _ in range(34):
        share = shares.next(shares.ready())
        order.append(share.limits.name)
        shares.charge(share, share.waiting[0].prompt_len)
    assert Counter(order) == {"a": 32, "b": 2}
    a, b = shares.get(A), shares.get(B)
    assert a is not None and b is not None
    a.credit, b.credit = -(10**12), -(10**12) - 1000
    assert shares.next([a, b]) is a
    assert 0 < a.credit <= QUANTUM and b.credit == a.credit - 1000


def test_credit_has_bounds() -> None:
    shares = KeyShares()
    shares.add(req(1, A))
    shares.charge_rows({"a": 8})
    a = shares.get(A)
    assert a is not None and a.credit == QUANTUM, "a key alone needn't pay"
    shares.add(req(2, B))
    for _ in range(10_000):
        shares.charge_rows({"a": 8})
    b = shares.get(B)
    assert b is not None
    assert (a.credit, b.credit) == (-MAX_DECODE_DEBT, QUANTUM)
    for _ in range(100):
        shares.charge(b, 2 * QUANTUM)
        shares.next([b])
    assert a.credit == QUANTUM, "what B used has paid A's debt, and no more"


@pytest.mark.parametrize("mixed", [True, False])
def test_a_long_prompt_leaves_room_for_another_key(mixed: bool) -> None:
    """While A's prompt is computed in chunks, B's prompts get a part of each step."""
    h = Harness(
        num_kv_tokens=512, max_model_len=400, chunked_prefill_size=32, enable_mixed_chunk=mixed
    )
    h.add(1, prompt(1, 320), 2, key=A)
    h.step()
    h.add(2, prompt(2, 12), 1, key=B)
    h.step()
    h.step()
    assert ("c", 2) in h.finished and h.scheduler.requests.interactive.chunked is not None
    h.run()


def test_a_key_at_its_limit_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps don't sort or match the queue of a key that may run nothing more."""
    h = Harness()
    limited = KeyLimits("a", max_running=2)
    for rid in range(100):
        h.add(rid, prompt(rid, 8), 40, key=limited)
    h.step()
    h.step()
    calls = 0

    def count(*_: Any) -> bool:
        nonlocal calls
        calls += 1
        return False

    monkeypatch.setattr(h.scheduler.prefill._policy, "sort", count)
    for _ in range(20):
        h.step()
    assert calls == 0


def test_queued_tokens() -> None:
    h = Harness(max_running_requests=2)
    few = KeyLimits("few", max_queued_tokens=50)
    h.add(1, prompt(1, 40), 4, key=few)
    h.add(2, prompt(2, 20), 4, key=few)
    h.collect()
    assert h.finished[("c", 2)].status == 429 and "key few" in h.finished[("c", 2)].message
    h.add(3, prompt(3, 51), 4, key=few)
    h.collect()
    assert (
        h.finished[("c", 3)].status == 400 and "max_queued_tokens" in h.finished[("c", 3)].message
    )
    h.add(4, prompt(4, 40), 6, key=few, resume=2)  # was let in before
    h.step()
    h.add(5, prompt(5, 50), 4, key=few)
    h.collect()
    assert ("c", 5) not in h.finished


def test_a_full_queue_has_places_for_other_keys() -> None:
    h = Harness(max_queued_requests=10)
    for rid in range(10):
        h.add(rid, prompt(rid, 8), key=A)
    h.add(20, prompt(20, 8), key=A)
    h.collect()
    assert h.finished[("c", 20)].status == 429
    for rid in range(30, 36):
        h.add(rid, prompt(rid, 8), key=B)
    h.collect()
    assert [("c", rid) in h.finished for rid in range(30, 36)] == [False] * 5 + [True]
    h.add(40, prompt(40, 8))  # one without a key has no part
    h.collect()
    assert h.finished[("c", 40)].status == 429


def test_priorities_order_the_requests_of_one_key() -> None:
    """Nobody has to leave for another key's urgent request."""
    h = Harness(max_running_requests=2, schedule_policy="priority", enable_priority_preemption=True)
    for rid, key in ((1, A), (2, A)):
        h.add(rid, prompt(rid, 8), 30, key=key, priority=5)
    h.step()
    h.add(3, prompt(3, 8), 2, key=B, priority=-9)
    for _ in range(5):
        h.step()
    assert h.scheduler.stats.preemptions_total == 0
    h.add(4, prompt(4, 8), 2, key=A, priority=0)
    h.run()
    assert h.scheduler.stats.preemptions_total > 0


def test_time_in_the_queue() -> None:
    h = Harness(max_running_requests=1)
    h.add(1, prompt(1, 8), 8)
    h.add(2, prompt(2, 8), 8)
    waited: dict[int, float] = {}
    for _ in range(100):
        h.step()
        for each in h.scheduler.requests.by_key.values():
            waited[each.rid] = each.queue_s
    assert waited[1] == pytest.approx(0.001) and waited[2] > 0.005


def req(rid: int, key: KeyLimits, length: int = 8) -> Req:
    h = Harness(max_model_len=2048, num_kv_tokens=4096)
    h.add(rid, prompt(rid, length), key=key)
    (made,) = h.scheduler.requests.by_key.values()
    return made
