"""Where a request runs: pure policies and the index they decide by; no Ray in here."""

from __future__ import annotations

from deploy.routing.policy import NoReplicaError, RoutingPolicy
from deploy.routing.prefix_index import ApplyResult, PrefixIndex, PrefixMatch
from deploy.routing.registry import ROUTING_POLICIES, make_policy
from deploy.routing.route_request import RouteRequest

__all__ = [
    "ROUTING_POLICIES",
    "ApplyResult",
    "NoReplicaError",
    "PrefixIndex",
    "PrefixMatch",
    "RouteRequest",
    "RoutingPolicy",
    "make_policy",
]
