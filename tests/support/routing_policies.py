"""Routing policies with requests to place."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulator import SimClock
from deploy.routing import RouteRequest, RoutingPolicy, make_policy

PAGE = 16


def policy_of(name: str, replicas: Iterable[str], clock: SimClock | None = None) -> RoutingPolicy:
    """The policy of this name in `POLICIES`, with replicas of these names."""
    policy = make_policy(POLICIES[name], clock or SimClock(), seed=1)
    for replica in replicas:
        policy.add_replica(replica)
    return policy


def request(number: int, *parts: tuple[int, int]) -> RouteRequest:
    """A prompt of (seed, tokens) parts. Prompts share equal parts at their start."""
    tokens = [np.random.default_rng(seed).integers(0, 1000, count) for seed, count in parts]
    return RouteRequest.from_tokens(str(number), np.concatenate(tokens).astype(np.int32), PAGE)


def send(policy: RoutingPolicy, what: RouteRequest, exclude: Iterable[str] = ()) -> str:
    """Choose a replica and book the request there."""
    replica = policy.choose(what, tuple(exclude))
    policy.on_dispatched(what, replica)
    return replica


def finish(policy: RoutingPolicy, number: int) -> None:
    """Tell the policy of the request's first token and of its end."""
    policy.on_first_token(str(number))
    policy.on_finished(str(number))
