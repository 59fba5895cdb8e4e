"""Ray Serve's routing of multiplexed models, as `MultiplexMixin` of Ray 2.60 has it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import numpy as np

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest


class RayMultiplexedPolicy(RoutingPolicy):
    """The better of two replicas, drawn at random from those that have the model; if none has it,
    from those that have the fewest models.

    A replica tells of a model once it has been read (`TELL_S`).
    """

    def __init__(self, slots: ReplicaSlots, index: PrefixIndex, clock: Clock, seed: int = 0):
        super().__init__(slots, index, clock, seed)
        self._random = random.Random(seed)
        self.held: Callable[[str], Sequence[str]] = lambda replica: ()
        """The models that a replica has; the simulator sets this."""

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        inflight = self._open_to(self.loads.inflight, exclude)
        every = np.flatnonzero(np.isfinite(inflight)).tolist()
        models = {slot: self.held(self.slots.name(slot)) for slot in every}
        candidates = [slot for slot in every if request.adapter in models[slot]]
        if not candidates:
            fewest = min(len(held) for held in models.values())
            candidates = [slot for slot in every if len(models[slot]) == fewest]
        two = self._random.sample(candidates, min(2, len(candidates)))
        return self.slots.name(min(two, key=inflight.item))
