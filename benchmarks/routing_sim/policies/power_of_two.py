"""The better of two: Ray Serve's default."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest


class PowerOfTwoPolicy(RoutingPolicy):
    """Chooses the one with fewer requests in flight of two replicas drawn at random.

    (Mitzenmacher, The power of two choices in randomized load balancing, 2001.)
    """

    def __init__(self, slots: ReplicaSlots, index: PrefixIndex, clock: Clock, seed: int = 0):
        super().__init__(slots, index, clock, seed)
        self._random = random.Random(seed)

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        inflight = self._open_to(self.loads.inflight, exclude)
        candidates = np.flatnonzero(np.isfinite(inflight)).tolist()
        two = self._random.sample(candidates, min(2, len(candidates)))
        return self.slots.name(min(two, key=inflight.item))
