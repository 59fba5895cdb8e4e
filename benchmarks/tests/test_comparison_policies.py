"""The policies that Manta's own is compared with. What all promise: test_routing_policy.py."""

from __future__ import annotations

import math

from benchmarks.routing_sim.policies.consistent_hash import LOAD_BOUND
from engine.protocol.messages import BlockStored
from tests.support.routing_policies import policy_of, request, send


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy = policy_of("round_robin", "abc")
    sizes = [10, 5000, 10, 4000, 3000, 7]
    chosen = [send(policy, request(i, (i, size))) for i, size in enumerate(sizes)]
    assert chosen == list("abcabc")
    assert send(policy, request(9, (9, 9)), "a") == "b"


def test_least_tokens_counts_cached_prompts_as_short() -> None:
    policy = policy_of("least_tokens", "ab")
    long = request(0, (1, 3200), (2, 10))
    policy.index.apply("a", 1, [BlockStored(1, long.page_hashes.tolist(), 0, "")])
    policy.on_dispatched(long, "a")
    policy.on_dispatched(request(1, (3, 100)), "b")
    assert policy.loads.queued.tolist() == [10.0, 100.0]
    assert policy.choose(request(2, (4, 50))) == "a"


def test_power_of_two_never_takes_the_fullest() -> None:
    policy = policy_of("power_of_two", "abc")
    for number in range(5):
        policy.on_dispatched(request(number, (number, 10)), "b")
    chosen = {policy.choose(request(9, (9, 10))) for _ in range(60)}
    assert chosen == {"a", "c"}


def test_consistent_hashing_moves_only_what_has_to_move() -> None:
    prompts = [request(number, (number, 300), (1, 100)) for number in range(200)]
    policy = policy_of("consistent_hash", "abcde")
    before = [policy.choose(prompt) for prompt in prompts]
    assert set(before) == set("abcde")
    policy.remove_replica("c")
    for prompt, replica in zip(prompts, before, strict=True):
        if replica != "c":
            assert policy.choose(prompt) == replica
    policy.add_replica("c")
    assert [policy.choose(prompt) for prompt in prompts] == before
    # Only the prompt's start decides.
    start = request(0, (7, 256))
    assert policy.choose(start) == policy.choose(request(1, (7, 256), (8, 1000)))


def test_bounded_hashing_keeps_every_replica_under_its_bound() -> None:
    policy = policy_of("bounded_consistent_hash", "abcd")
    for number in range(100):
        send(policy, request(number, (1, 300)))
        assert policy.loads.inflight.max() <= math.ceil(LOAD_BOUND * (number + 1) / 4)


def test_rays_rule_follows_a_match_whatever_the_queue() -> None:
    policy = policy_of("ray_prefix_tree", "abc")
    first = send(policy, request(0, (1, 800)))
    for number in range(1, 100):
        assert send(policy, request(number, (1, 800), (number, 100))) == first
    # Less than a tenth in common is no match.
    assert send(policy, request(200, (1, 48), (200, 900))) != first


def test_sglangs_rule_drops_affinity_when_queues_differ() -> None:
    policy = policy_of("sglang_prefix_tree", "ab")
    first = send(policy, request(0, (1, 800)))
    chosen = [send(policy, request(number, (1, 800))) for number in range(1, 70)]
    assert chosen[:64] == [first] * 64
    assert chosen[64] != first


def test_a_removed_replica_leaves_the_text_tree() -> None:
    policy = policy_of("ray_prefix_tree", "ab")
    first = send(policy, request(0, (1, 800)))
    other = "b" if first == "a" else "a"
    policy.remove_replica(first)
    assert send(policy, request(1, (1, 800))) == other
    policy.add_replica("c")
    assert send(policy, request(2, (1, 800))) == other
