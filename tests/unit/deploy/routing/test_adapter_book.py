"""What a router knows of the adapters at each replica, and what that does to its choices."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deploy.routing import RouteRequest, make_policy
from deploy.routing.adapter_book import EVICT_TOKENS, LOAD_TOKENS, SLOT_TOKENS, AdapterBook


def test_costs() -> None:
    book = AdapterBook(max_running=2, max_held=3)
    for slot in (0, 2):
        book.add(slot)
    assert book.cost("a", 3).tolist() == [LOAD_TOKENS, 0.0, LOAD_TOKENS]
    book.dispatched("r1", 0, "a")
    assert book.cost("a", 3).tolist() == [0.0, 0.0, LOAD_TOKENS]
    book.dispatched("r2", 0, "b")
    assert book.cost("c", 3)[0] == SLOT_TOKENS + LOAD_TOKENS
    book.finished("r1")
    assert book.cost("a", 3)[0] == 0.0  # still in memory
    book.dispatched("r3", 0, "c")
    book.finished("r3")
    assert book.cost("d", 3)[0] == LOAD_TOKENS + EVICT_TOKENS
    book.dispatched("r4", 0, "d")
    assert book.cost("a", 3)[0] == SLOT_TOKENS + LOAD_TOKENS + EVICT_TOKENS  # used longest ago
    book.dispatched("r4", 2, "d")  # it was sent elsewhere
    assert book.cost("d", 3).tolist() == [0.0, 0.0, 0.0]
    book.remove(2)
    book.finished("r4")
    book.finished("unknown")


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "b", "c", "d"]))))
def test_counts_return_to_nothing(sent: list[tuple[int, str]]) -> None:
    book = AdapterBook(max_running=1, max_held=2)
    for slot in range(3):
        book.add(slot)
    for number, (slot, adapter) in enumerate(sent):
        book.dispatched(str(number), slot, adapter)
        if number % 3 == 0:
            book.finished(str(number // 2))
    for number in range(len(sent)):
        book.finished(str(number))
    assert all(cost <= LOAD_TOKENS + EVICT_TOKENS for cost in book.cost("a", 3))


def test_an_adapter_gathers_and_a_hot_one_spreads() -> None:
    now = 0.0
    policy = make_policy("prefix_aware", lambda: now)
    for name in ("x", "y", "z"):
        policy.add_replica(name)
    rng = np.random.default_rng(1)

    def send(number: int, adapter: str, tokens: int) -> str:
        ids = rng.integers(0, 1000, tokens, dtype=np.int32)
        request = RouteRequest.from_tokens(str(number), ids, 16, adapter, adapter)
        chosen = policy.choose(request)
        policy.on_dispatched(request, chosen)
        return chosen

    homes = {adapter: send(n, adapter, 100) for n, adapter in enumerate("abc")}
    assert len(set(homes.values())) == 3
    for n in range(10, 40):
        adapter = "abc"[n % 3]
        assert send(n, adapter, 100) == homes[adapter]
        policy.on_finished(str(n))
    spread = Counter(send(n, "a", 4000) for n in range(100, 130))
    assert len(spread) == 3, "the hot adapter stays at one replica"
