"""Routing policies by the configuration's word."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from deploy.routing.consistent_hash import BoundedConsistentHashPolicy, ConsistentHashPolicy
from deploy.routing.least_tokens import LeastTokensPolicy
from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.power_of_two import PowerOfTwoPolicy
from deploy.routing.prefix_aware import PrefixAwarePolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.round_robin import RoundRobinPolicy
from deploy.routing.text_tree import RayPrefixTreePolicy, SGLangPrefixTreePolicy

ROUTING_POLICIES: Final[Mapping[str, type[RoutingPolicy]]] = MappingProxyType(
    {
        "prefix_aware": PrefixAwarePolicy,
        "round_robin": RoundRobinPolicy,
        "power_of_two": PowerOfTwoPolicy,
        "least_tokens": LeastTokensPolicy,
        "consistent_hash": ConsistentHashPolicy,
        "bounded_consistent_hash": BoundedConsistentHashPolicy,
        "ray_prefix_tree": RayPrefixTreePolicy,
        "sglang_prefix_tree": SGLangPrefixTreePolicy,
    }
)


def make_policy(
    name: str, clock: Clock, *, seed: int = 0, sample_every: int = 1, max_pages: int = 4_000_000
) -> RoutingPolicy:
    """A fresh policy that knows no replica yet.

    Args:
        name: a word of ROUTING_POLICIES.
        clock: seconds, e.g. time.monotonic.
        seed: for policies that draw lots.
        sample_every: see PrefixIndex; 16 // page_size, at least 1, keeps its cost independent
            of the page size.
        max_pages: see PrefixIndex.

    Raises:
        ValueError: no such policy.
    """
    policy = ROUTING_POLICIES.get(name)
    if policy is None:
        raise ValueError(
            f"routing policy {name!r} is unknown; choose one of {', '.join(ROUTING_POLICIES)}"
        )
    slots = ReplicaSlots()
    index = PrefixIndex(slots, max_pages=max_pages, sample_every=sample_every)
    return policy(slots, index, clock, seed)
