"""Which engine replica gets a request: policies and the index that they decide by, without Ray."""

from __future__ import annotations

from deploy.routing.policy import NoReplicaError, RoutingPolicy
from deploy.routing.prefix_index import ApplyResult, PrefixIndex
from deploy.routing.prefix_match import PrefixMatch
from deploy.routing.registry import ROUTING_POLICIES, find_policy, make_policy
from deploy.routing.route_request import RouteRequest

__all__ = [
    "ROUTING_POLICIES",
    "ApplyResult",
    "NoReplicaError",
    "PrefixIndex",
    "PrefixMatch",
    "RouteRequest",
    "RoutingPolicy",
    "find_policy",
    "make_policy",
]
