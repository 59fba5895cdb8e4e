"""Routing policies that Manta's own is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

POLICIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "prefix_aware": "prefix_aware",
        "round_robin": f"{__name__}.round_robin:RoundRobinPolicy",
        "power_of_two": f"{__name__}.power_of_two:PowerOfTwoPolicy",
        "least_tokens": f"{__name__}.least_tokens:LeastTokensPolicy",
        "consistent_hash": f"{__name__}.consistent_hash:ConsistentHashPolicy",
        "bounded_consistent_hash": f"{__name__}.consistent_hash:BoundedConsistentHashPolicy",
        "ray_multiplexed": f"{__name__}.multiplexed:RayMultiplexedPolicy",
        "ray_prefix_tree": f"{__name__}.text_tree:RayPrefixTreePolicy",
        "sglang_prefix_tree": f"{__name__}.text_tree:SGLangPrefixTreePolicy",
    }
)
"""Name in the results to the value of `routing_policy`."""
