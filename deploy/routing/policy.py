"""The decision where a request runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deploy.routing.adapter_book import AdapterBook
from deploy.routing.load_book import LoadBook
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest

Clock: TypeAlias = Callable[[], float]
"""Seconds that only go forward."""


class NoReplicaError(LookupError):
    """No replica is left to choose from."""


class RoutingPolicy(ABC):
    """Chooses a replica for each request, and is told what becomes of it.

    A policy does no I/O, starts no thread, and reads no clock but the one it is given. So the
    ingress and the simulator run the same object. The caller tells it of replicas (add_replica,
    remove_replica), of their cache events (index.apply, if uses_index is set), and of every
    request, in this order: choose, on_dispatched, on_first_token, on_finished. on_dispatched
    follows in the same turn of the event loop: the next choice has to know of this one. A request
    that is sent a second time comes again under the same id; from then on it counts at its new
    replica only.

    `routing_policy: module:Class` serves a subclass. A subclass with a constructor of its own
    takes these four arguments and passes them on: `slots`, empty, which the index uses too;
    `index`, empty; `clock`, see `Clock`; `seed`, for policies that draw random numbers.
    """

    uses_index: ClassVar[bool] = False
    """Whether the index is fed: with cache events by the caller, with bookings by the policy."""

    def __init__(self, slots: ReplicaSlots, index: PrefixIndex, clock: Clock, seed: int = 0):
        self.slots = slots
        self.index = index
        self.loads = LoadBook(clock)
        """Without flex requests: the others are placed as if there were none."""
        self.flex_loads = LoadBook(clock)
        self.adapters = AdapterBook()
        self.clock = clock
        self.seed = seed

    @abstractmethod
    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        """The replica for this request. Nothing is booked yet.

        Replicas in `exclude` must not get it, because they refused it or failed with it. Raises
        `NoReplicaError` if there is no replica, or all are excluded.
        """

    def add_replica(self, replica: str) -> None:
        """A replica has appeared; its cache is taken to be empty."""
        if replica not in self.slots:
            slot = self.slots.add(replica)
            self.loads.add(slot)
            self.flex_loads.add(slot)
            self.adapters.add(slot)
            self.index.add(replica)

    def remove_replica(self, replica: str) -> None:
        """A replica has gone. From now on notices about its requests are ignored."""
        if replica in self.slots:
            self.index.forget(replica)
            slot = self.slots.remove(replica)
            self.loads.remove(slot)
            self.flex_loads.remove(slot)
            self.adapters.remove(slot)

    def on_dispatched(self, request: RouteRequest, replica: str) -> None:
        """The request goes to this replica, which may be another than the chosen one. Raises
        `KeyError` if the replica is unknown."""
        slot = self.slots.slot(replica)
        uncached = request.num_tokens
        self.adapters.dispatched(request.request_id, slot, request.adapter)
        if request.is_flex:
            self.flex_loads.dispatched(request.request_id, slot, uncached)
            return
        if self.uses_index:
            matched = self.index.book(
                request.request_id, replica, request.page_hashes, self.clock()
            )
            uncached -= min(matched, request.reusable_pages) * request.page_size
        self.loads.dispatched(request.request_id, slot, uncached)

    def on_first_token(self, request_id: str) -> None:
        """The request's prefill is done. Unknown requests are ignored."""
        self.loads.first_token(request_id)
        self.flex_loads.first_token(request_id)
        if self.uses_index:
            self.index.settle(request_id, self.clock())

    def on_finished(self, request_id: str) -> None:
        """The request is done, cancelled or lost. Unknown requests are ignored."""
        self.loads.finished(request_id)
        self.flex_loads.finished(request_id)
        self.adapters.finished(request_id)
        if self.uses_index:
            self.index.cancel(request_id)

    def _open_to(self, load: NDArray[np.float64], exclude: Collection[str]) -> NDArray[np.float64]:
        """load [capacity], with inf for excluded replicas. Raises `NoReplicaError` if nothing
        finite is left."""
        if exclude:
            load = load.copy()
            for replica in exclude:
                slot = self.slots.get(replica)
                if slot is not None:
                    load[slot] = np.inf
        if not len(self.slots) or (exclude and load.item(load.argmin()) == np.inf):
            raise NoReplicaError("no replica is left to choose from")
        return load
