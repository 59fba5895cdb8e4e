"""Prompts with the same start go to the same replica."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from deploy.routing.policy import Clock, NoReplicaError, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest

KEY_TOKENS: Final = 256
"""Number of leading tokens that decide."""
VIRTUAL_NODES: Final = 100
"""Points of a replica on the ring, the same number as in Ray Serve's ConsistentHashRouter."""
LOAD_BOUND: Final = 1.25


class ConsistentHashPolicy(RoutingPolicy):
    """The next replica on a ring of hashes (Karger et al., 1997)."""

    def __init__(self, slots: ReplicaSlots, index: PrefixIndex, clock: Clock, seed: int = 0):
        super().__init__(slots, index, clock, seed)
        self._ring: list[tuple[int, str]] = []

    def add_replica(self, replica: str) -> None:
        if replica not in self.slots:
            super().add_replica(replica)
            for point in range(VIRTUAL_NODES):
                digest = xxh3_64_intdigest(f"{replica}#{point}".encode())
                bisect.insort(self._ring, (digest, replica))

    def remove_replica(self, replica: str) -> None:
        super().remove_replica(replica)
        self._ring = [point for point in self._ring if point[1] != replica]

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        for replica in self._walk(request):
            if replica not in exclude:
                return replica
        raise NoReplicaError("no replica is left to choose from")

    def _walk(self, request: RouteRequest) -> Iterator[str]:
        """Replicas at the points of the ring, from the prompt's point on, once around."""
        key = xxh3_64_intdigest(request.token_ids[:KEY_TOKENS].astype("<i4").tobytes())
        start = bisect.bisect_left(self._ring, (key, ""))
        for position in range(start, start + len(self._ring)):
            yield self._ring[position % len(self._ring)][1]


class BoundedConsistentHashPolicy(ConsistentHashPolicy):
    """The next replica on the ring that has room (Mirrokni et al., arXiv:1608.01350).

    A replica has room if it has at most LOAD_BOUND times the mean of requests in flight, this one
    included.
    """

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        if not self.slots:
            raise NoReplicaError("no replica is left to choose from")
        bound = math.ceil(LOAD_BOUND * (len(self.loads) + 1) / len(self.slots))
        for replica in self._walk(request):
            inflight = self.loads.inflight[self.slots.slot(replica)]
            if replica not in exclude and inflight + 1 <= bound:
                return replica
        # All replicas that have room are excluded.
        return super().choose(request, exclude)
