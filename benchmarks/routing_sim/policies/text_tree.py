"""Affinity by what was routed before: the rules of Ray's and of SGLang's router."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing_sim.policies.routed_prefixes import RoutedMatch, RoutedPrefixes
from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest

RAY_MATCH_RATE: Final = 0.1
SGLANG_CACHE_THRESHOLD: Final = 0.3
SGLANG_BALANCE_ABS: Final = 64
SGLANG_BALANCE_REL: Final = 1.5


class TextTreePolicy(RoutingPolicy):
    """The common part of both: a tree of routed prompts; misses go to the smallest tenant."""

    def __init__(self, slots: ReplicaSlots, index: PrefixIndex, clock: Clock, seed: int = 0):
        super().__init__(slots, index, clock, seed)
        self._routed = RoutedPrefixes()

    def add_replica(self, replica: str) -> None:
        if replica not in self.slots:
            super().add_replica(replica)
            self._routed.add(self.slots.slot(replica))

    def remove_replica(self, replica: str) -> None:
        slot = self.slots.get(replica)
        if slot is not None:
            self._routed.remove(slot)
        super().remove_replica(replica)

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        inflight = self._open_to(self.loads.inflight, exclude)
        found = self._routed.match(request.page_hashes.tolist())
        usable = [slot for slot in found.slots if inflight[slot] != np.inf]
        return self.slots.name(
            self._choose(request, inflight, RoutedMatch(found.num_pages, usable))
        )

    def on_dispatched(self, request: RouteRequest, replica: str) -> None:
        super().on_dispatched(request, replica)
        self._routed.insert(self.slots.slot(replica), request.page_hashes.tolist())

    @abstractmethod
    def _choose(
        self, request: RouteRequest, inflight: NDArray[np.float64], found: RoutedMatch
    ) -> int:
        """The chosen slot. inflight: [capacity], inf where no replica may be chosen."""

    def _smallest(self, inflight: NDArray[np.float64]) -> int:
        """The slot that was sent the fewest pages; ties: fewest in flight."""
        slots = np.flatnonzero(np.isfinite(inflight)).tolist()
        return min(slots, key=lambda slot: (self._routed.size(slot), inflight[slot]))


class RayPrefixTreePolicy(TextTreePolicy):
    """Ray Serve's PrefixCacheAffinityRouter with its defaults (Ray 2.60).

    With a match of 10 % or more, it chooses the replica with the fewest in flight among those with
    the longest match. The imbalance limit is infinite, and the tree is never pruned.
    """

    def _choose(
        self, request: RouteRequest, inflight: NDArray[np.float64], found: RoutedMatch
    ) -> int:
        rate = found.num_pages * request.page_size / max(request.num_tokens, 1)
        if found.slots and rate >= RAY_MATCH_RATE:
            return min(found.slots, key=inflight.item)
        return self._smallest(inflight)


class SGLangPrefixTreePolicy(TextTreePolicy):
    """SGLang's router, policy cache_aware, with its defaults.

    When the fleet is out of balance (fullest - emptiest > 64 in flight, and more than 1.5
    times it) every request goes to the shortest queue; else a match above 30 % goes to one
    replica that has it.
    """

    def _choose(
        self, request: RouteRequest, inflight: NDArray[np.float64], found: RoutedMatch
    ) -> int:
        finite = inflight[np.isfinite(inflight)]
        most, fewest = float(finite.max()), float(finite.min())
        if most - fewest > SGLANG_BALANCE_ABS and most > SGLANG_BALANCE_REL * fewest:
            return self.loads.least(inflight)
        rate = found.num_pages * request.page_size / max(request.num_tokens, 1)
        if found.slots and rate > SGLANG_CACHE_THRESHOLD:
            return found.slots[0]
        return self._smallest(inflight)
