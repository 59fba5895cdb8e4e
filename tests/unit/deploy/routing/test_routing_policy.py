from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulator import SimClock
from deploy.routing import NoReplicaError, RouteRequest, RoutingPolicy
from deploy.routing.load_book import LoadBook
from deploy.routing.prefix_aware import PrefixAwarePolicy, PrefixAwareWeights
from deploy.routing.waiting_prefixes import STEP_TOKENS, WaitingPrefixes
from engine.protocol.messages import BlockStored
from tests.support.prefix_depth import depth_of
from tests.support.routing_policies import PAGE, finish, policy_of, request, send

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
relaxed = settings(max_examples=120)


def held_pages(policy: RoutingPolicy, replica: str, page_hashes: NDArray[np.uint64]) -> int:
    """Leading pages of a prompt that the index knows at a replica."""
    return depth_of(policy.index.match(page_hashes), policy.slots.slot(replica))


# --- what every policy promises, those for comparison included


@every_policy
def test_no_replica_to_choose_from(name: str) -> None:
    policy = policy_of(name, [])
    with pytest.raises(NoReplicaError):
        policy.choose(request(0, (1, 100)))
    policy.add_replica("a")
    policy.add_replica("b")
    assert policy.choose(request(0, (1, 100))) in "ab"
    with pytest.raises(NoReplicaError):
        policy.choose(request(0, (1, 100)), ("b", "a"))
    policy.remove_replica("a")
    policy.remove_replica("b")
    with pytest.raises(NoReplicaError):
        policy.choose(request(0, (1, 100)))


@every_policy
def test_excluded_and_removed_replicas_are_never_chosen(name: str) -> None:
    rng = np.random.default_rng(3)
    policy = policy_of(name, "abcde")
    alive = set("abcde")
    for number in range(300):
        if number == 100:
            policy.remove_replica("b")
            alive.remove("b")
        if number == 200:
            policy.add_replica("f")
            alive.add("f")
        excluded = set(rng.choice(sorted(alive), int(rng.integers(0, 4)), replace=False).tolist())
        # One family of prompts, so that affinity pulls towards what is excluded.
        what = request(number, (int(rng.integers(3)), 320), (number, 40))
        assert send(policy, what, excluded | {"no such replica"}) in alive - excluded
        if number % 3 == 0:
            finish(policy, int(rng.integers(number + 1)))
    for number in range(300):
        finish(policy, number)
    assert len(policy.loads) == 0
    assert policy.loads.inflight[[policy.slots.slot(name) for name in alive]].tolist() == [0.0] * 5


@every_policy
def test_choosing_books_nothing(name: str) -> None:
    policy = policy_of(name, "abc")
    send(policy, request(0, (1, 500)))
    before = (policy.loads.queued.tolist(), policy.loads.inflight.tolist(), policy.index.num_pages)
    for number in range(1, 20):
        policy.choose(request(number, (number, 500)))
    after = (policy.loads.queued.tolist(), policy.loads.inflight.tolist(), policy.index.num_pages)
    assert after == before


@every_policy
def test_a_replica_that_comes_back_starts_with_nothing(name: str) -> None:
    policy = policy_of(name, "ab")
    policy.on_dispatched(request(0, (1, 500)), "a")
    policy.on_first_token("0")
    policy.on_dispatched(request(1, (2, 500)), "a")
    policy.remove_replica("a")
    policy.add_replica("c")
    # Late notices about the replica that has gone.
    for number in (0, 1):
        policy.on_first_token(str(number))
        policy.on_finished(str(number))
    slot = policy.slots.slot("c")
    assert (policy.loads.queued[slot], policy.loads.inflight[slot]) == (0.0, 0.0)
    assert policy.index.pages_of("c") == set()
    assert len(policy.loads) == 0
    with pytest.raises(KeyError):
        policy.on_dispatched(request(2, (1, 500)), "a")


@every_policy
def test_a_resubmitted_request_counts_where_it_goes_now(name: str) -> None:
    policy = policy_of(name, "ab")
    policy.on_dispatched(request(0, (1, 500)), "a")
    policy.on_first_token("0")
    policy.on_dispatched(request(0, (1, 500), (2, 30)), "b")
    assert policy.loads.inflight.tolist() == [0.0, 1.0]
    assert policy.loads.queued[0] == 0.0
    assert policy.loads.queued[1] == 530.0


# --- queues, reservation and ties


@pytest.mark.parametrize("name", ["prefix_aware", "least_tokens", "round_robin"])
def test_what_was_sent_a_moment_ago_counts_at_once(name: str) -> None:
    """No report arrives in between: without booking all would go to one replica."""
    policy = policy_of(name, "abcdefgh")
    assert {send(policy, request(number, (number, 2000))) for number in range(8)} == set("abcdefgh")


@pytest.mark.parametrize("name", ["prefix_aware", "least_tokens"])
def test_ties_go_to_the_replica_used_longest_ago(name: str) -> None:
    policy = policy_of(name, "abc")
    order = []
    for number in range(9):
        order.append(send(policy, request(number, (number, 200))))
        finish(policy, number)
    assert order == ["a", "b", "c"] * 3


def test_the_last_token_is_always_computed() -> None:
    policy = policy_of("least_tokens", "a")
    whole = request(0, (1, 10 * PAGE))
    policy.index.apply("a", 1, [BlockStored(1, whole.page_hashes.tolist(), 0, "")])
    policy.on_dispatched(whole, "a")
    assert policy.loads.queued.tolist() == [float(PAGE)]


# --- prefixes


def test_pages_of_a_request_on_its_way_count_at_once() -> None:
    policy = policy_of("prefix_aware", "abcd")
    first = send(policy, request(0, (1, 3200), (2, 40)))
    for number, other in enumerate(sorted({*"abcd"} - {first}), 5):
        policy.on_dispatched(request(number, (number, 1000)), other)
    second = request(1, (1, 3200), (3, 40))
    assert send(policy, second) == first
    slot = policy.slots.slot(first)
    assert policy.loads.queued[slot] == 3240 + 40
    # It ends before its first token: its pages never came to be. Those of the second did.
    policy.on_finished("0")
    assert held_pages(policy, first, second.page_hashes) == len(second.page_hashes)
    policy.on_finished("1")
    assert policy.index.pages_of(first) == set()


def test_booked_pages_wait_for_their_events_only_so_long() -> None:
    clock = SimClock()
    policy = policy_of("prefix_aware", "ab", clock)
    first = send(policy, request(0, (1, 320)))
    finish(policy, 0)
    assert len(policy.index.pages_of(first)) == 20
    clock.now = 1000.0
    send(policy, request(1, (2, 320)), [first])
    assert policy.index.pages_of(first) == set()


def test_a_long_queue_outweighs_a_cached_prompt() -> None:
    policy = policy_of("prefix_aware", "ab")
    shared = request(0, (1, 800))
    policy.index.apply("a", 1, [BlockStored(1, shared.page_hashes.tolist(), 0, "")])
    assert policy.choose(request(1, (1, 800), (2, 10))) == "a"
    policy.on_dispatched(request(2, (3, 1000)), "a")
    assert policy.choose(request(1, (1, 800), (2, 10))) == "a"
    policy.on_dispatched(request(3, (4, 3000)), "a")
    assert policy.choose(request(1, (1, 800), (2, 10))) == "b"


fleets = st.fixed_dictionaries(
    {
        "replicas": st.sampled_from([1, 2, 5, 30, 60, 120]),
        "seed": st.integers(0, 2**16),
        "held": st.sampled_from([0.0, 0.1, 0.6, 1.0]),
        "levels": st.sampled_from([1, 3, 60]),
        "per_replica": st.sampled_from([0.2, 1.0, 3.0]),
        "tokens": st.sampled_from([1, 60, 900]),
        "sharing": st.sampled_from([0.0, 0.3, 1.0]),
        "excluded": st.integers(0, 5),
        "waited": st.floats(0.0, 3.0),
    }
)


@given(fleets)
@settings(max_examples=300)
def test_prefix_aware_finds_the_least_score_of_all(fleet: dict[str, float]) -> None:
    """Against every replica in turn; few and many holders, deep and ragged matches, hot ones."""
    rng = np.random.default_rng(int(fleet["seed"]))
    clock = SimClock()
    names = [str(number) for number in range(int(fleet["replicas"]))]
    policy = policy_of("prefix_aware", names, clock)
    assert isinstance(policy, PrefixAwarePolicy)
    # Half of them end with a page, whose last token is computed all the same.
    tokens = int(rng.integers(1, 1000)) if rng.random() < 0.5 else PAGE * int(rng.integers(1, 60))
    what = request(10_000, (1, tokens))
    depths = rng.integers(0, len(what.page_hashes) + 1, int(fleet["levels"]))
    for name in names:
        depth = int(rng.choice(depths))
        if depth and rng.random() < fleet["held"]:
            policy.index.apply(name, 1, [BlockStored(1, what.page_hashes[:depth].tolist(), 0, "")])
    waiting: dict[int, int] = {}
    for number in range(int(fleet["per_replica"] * len(names))):
        clock.now += rng.exponential(0.01)
        shares = rng.random() < fleet["sharing"]
        shared = int(rng.integers(len(what.page_hashes) + 1)) if shares else 0
        zeros = np.zeros(PAGE * shared + int(rng.integers(1, fleet["tokens"] + 1)), np.int32)
        other = RouteRequest(str(number), zeros, PAGE, what.page_hashes[:shared])
        policy.on_dispatched(other, str(rng.choice(names)))
        waiting[number] = shared
        if rng.random() < 0.5:
            done = int(rng.integers(number + 1))
            policy.on_first_token(str(done))
            waiting.pop(done, None)
    clock.now += fleet["waited"]
    excluded = rng.permutation(names)[: min(int(fleet["excluded"]), len(names) - 1)].tolist()

    weights = policy.weights
    queued = policy.loads.remaining()
    weight = min(
        weights.uncached_max, weights.uncached + float(queued.min()) / weights.backlog_tokens
    )
    pages = what.page_hashes[: what.reusable_pages]
    depths = {name: held_pages(policy, name, pages) for name in names}
    known = max(depths.values())
    if counted := known * PAGE // STEP_TOKENS * STEP_TOKENS // PAGE:
        sharers = sum(shared >= counted for shared in waiting.values())
        weight /= 1 + sharers / list(depths.values()).count(known)
    scores = {}
    for name in set(names) - set(excluded):
        slot = policy.slots.slot(name)
        scores[name] = (
            weight * (known - depths[name]) * PAGE
            + queued[slot]
            + weights.inflight_tokens * policy.loads.inflight[slot]
        )
    chosen = policy.choose(what, excluded)
    assert scores[chosen] == pytest.approx(min(scores.values()), abs=1e-6)


def test_the_idlest_replica_wins_with_a_shallower_match() -> None:
    """Four busy replicas hold a little more of the prompt than it does."""
    policy = policy_of("prefix_aware", "abcde")
    what = request(0, (1, 700))
    for depth, name in zip((40, 39, 38, 37, 36), "abcde", strict=True):
        policy.index.apply(name, 1, [BlockStored(1, what.page_hashes[:depth].tolist(), 0, "")])
    for number, name in enumerate("abcd", 1):
        policy.on_dispatched(
            RouteRequest(str(number), np.zeros(1000, np.int32), PAGE, np.empty(0, np.uint64)), name
        )
    assert policy.choose(what) == "e"
    assert policy.choose(what, "e") == "a"


def test_the_price_of_a_copy_is_shared_by_those_who_wait_for_it() -> None:
    """5 wait at a for 2,500 tokens; a copy of 3,200 is worth it if they are of the same prompt."""
    for shared, copies, expected in ((False, 1, "a"), (True, 1, "b"), (True, 5, "a")):
        policy = policy_of("prefix_aware", "abcdef")
        what = request(0, (1, 3200), (2, 40))
        for name in "acdef"[:copies]:
            policy.index.apply(name, 1, [BlockStored(1, what.page_hashes[:200].tolist(), 0, "")])
        for number, name in enumerate("cdef", 20):
            policy.on_dispatched(request(number, (number, 6000)), name)
        for number in range(3, 8):
            parts = [(1, 3200)] if shared else []
            policy.on_dispatched(request(number, *parts, (number, 500)), "a")
        assert policy.loads.queued[0] == 2500
        assert policy.choose(what) == expected
        # They have their first tokens: nobody waits, and no queue makes a copy worth while.
        for number in range(3, 8):
            policy.on_first_token(str(number))
        assert policy.choose(what) == "a"


waiting_steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "forget"]),
        st.integers(0, 5),
        st.sampled_from("ab"),
        st.integers(0, 3),
        st.sampled_from([0, 255, 256, 500, 520]),
    ),
    max_size=30,
)


@given(waiting_steps, st.sampled_from([1, 16, 512]))
@relaxed
def test_waiting_prefixes_equal_a_recount(
    steps: list[tuple[str, int, str, int, int]], page_size: int
) -> None:
    """Prompts of 700 tokens that begin with so many of a first one."""
    first = np.arange(700, dtype=np.int32)
    probe = RouteRequest.from_tokens("probe", first, page_size)
    counts = WaitingPrefixes()
    waiting: dict[str, tuple[str, int]] = {}
    for what, number, replica, tail, shared in steps:
        key = str(number)
        match what:
            case "add":
                tokens = np.concatenate([first[:shared], np.full(700 - shared, -1 - tail)])
                counts.add(RouteRequest.from_tokens(key, tokens, page_size), replica)
                waiting[key] = (replica, shared)
            case "remove":
                counts.remove(key)
                waiting.pop(key, None)
            case "forget":
                counts.forget(replica)
                waiting = {key: at for key, at in waiting.items() if at[0] != replica}
        assert len(counts) == len(waiting)
        for pages in range(len(probe.page_hashes) + 1):
            tokens_counted = pages * page_size // max(STEP_TOKENS, page_size)
            tokens_counted *= max(STEP_TOKENS, page_size)
            expected = sum(shared >= tokens_counted for _, shared in waiting.values())
            assert counts.count(probe, pages) == (expected if tokens_counted else 0)


def test_the_weights_are_those_that_were_measured() -> None:
    """Changing one means tuning and measuring again (benchmarks/routing.py, docs/routing.md)."""
    assert PrefixAwareWeights() == PrefixAwareWeights(2.0, 8.0, 1000.0, 64.0)


# --- the books

book_steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "first", "finish", "remove", "add", "wait"]),
        st.integers(0, 7),
        st.integers(0, 3),
        st.integers(0, 500),
    ),
    max_size=60,
)


@given(book_steps)
@relaxed
def test_books_equal_a_recount(steps: list[tuple[str, int, int, int]]) -> None:
    clock = SimClock()
    book = LoadBook(clock)
    open_slots = {0, 1, 2, 3}
    for slot in open_slots:
        book.add(slot)
    flights: dict[str, tuple[int, int, bool]] = {}
    last_used: dict[int, int] = dict.fromkeys(open_slots, 0)
    for tick, (what, number, slot, tokens) in enumerate(steps, 1):
        key = str(number)
        match what:
            case "send" if slot in open_slots:
                book.dispatched(key, slot, tokens)
                flights.pop(key, None)
                flights[key] = (slot, tokens, True)
                last_used[slot] = tick
            case "first":
                book.first_token(key)
                if key in flights:
                    flights[key] = (*flights[key][:2], False)
            case "finish":
                book.finished(key)
                flights.pop(key, None)
            case "remove" if slot in open_slots:
                open_slots.remove(slot)
                book.remove(slot)
                flights = {k: f for k, f in flights.items() if f[0] != slot}
            case "add" if slot not in open_slots:
                open_slots.add(slot)
                book.add(slot)
                last_used[slot] = 0
            case "wait":
                clock.now += tokens / 100
        assert len(book) == len(flights)
        remaining = book.remaining()
        for at in range(4):
            mine = [f for f in flights.values() if f[0] == at]
            queued = [f[1] for f in mine if f[2]]
            if at in open_slots:
                assert book.queued[at] == sum(queued)
                assert book.inflight[at] == len(mine)
                # At most the head of the line is taken to be partly done.
                head = queued[0] if queued else 0
                assert sum(queued) - head - 1e-9 <= remaining[at] <= sum(queued)
            else:
                assert book.queued[at] == book.inflight[at] == remaining[at] == np.inf
    if open_slots:
        load = book.inflight
        tied = [at for at in open_slots if load[at] == load.min()]
        fewest = min(book.queued[at] for at in tied)
        tied = [at for at in tied if book.queued[at] == fewest]
        assert book.least(load) in tied
        assert last_used[book.least(load)] == min(last_used[at] for at in tied)


def test_the_head_of_a_line_shrinks_at_the_speed_seen_so_far() -> None:
    clock = SimClock()
    book = LoadBook(clock)
    book.add(0)
    book.dispatched("x", 0, 1000)
    clock.now = 0.5
    assert book.remaining().tolist() == [1000.0]  # no speed known yet
    book.dispatched("y", 0, 400)
    book.dispatched("z", 0, 50)
    book.first_token("x")
    # 1,000 tokens in 0.5 s: y is half done after 0.1 s.
    clock.now = 0.6
    assert book.remaining().tolist() == [pytest.approx(200.0 + 50.0)]
    clock.now = 9.0
    assert book.remaining().tolist() == [50.0]
    # One that overtook the head says nothing about how far the head is.
    book.first_token("z")
    assert book.remaining().tolist() == [0.0]


# --- flex requests


def flex(number: int, *parts: tuple[int, int]) -> RouteRequest:
    return dataclasses.replace(request(number, *parts), is_flex=True)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600), st.booleans()), max_size=40))
@relaxed
def test_others_are_placed_as_without_flex_requests(arrivals: list[tuple[int, int, bool]]) -> None:
    """Those with True are flex."""
    names = ["a", "b", "c"]
    alone, mixed = policy_of("prefix_aware", names), policy_of("prefix_aware", names)
    for number, (seed, length, is_flex) in enumerate(arrivals):
        if is_flex:
            send(mixed, flex(number, (seed, length)))
        else:
            what = request(number, (seed, length))
            assert send(mixed, what) == send(alone, what)
        if number % 3 == 0:
            finish(alone, number)
            finish(mixed, number)
    for number in range(len(arrivals)):
        finish(mixed, number)
    assert len(mixed.loads) == len(mixed.flex_loads) == 0


def test_flex_requests_go_where_most_room_is() -> None:
    policy = policy_of("prefix_aware", ["a", "b", "c"])
    busy = send(policy, request(0, (0, 400)))
    placed = {send(policy, flex(number, (number, 100))) for number in (1, 2)}
    assert placed == {"a", "b", "c"} - {busy}
    assert send(policy, flex(3, (3, 300))) != busy
