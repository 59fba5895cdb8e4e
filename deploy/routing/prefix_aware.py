"""Manta's own policy: the cheapest place for a prompt, its queue included."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest
from deploy.routing.waiting_prefixes import WaitingPrefixes

_FEW = 40
"""Replicas up to which a loop over bits is faster than numpy."""
_CHUNK = 4
"""Levels of a match that are looked at together, at most 255."""


@dataclass(frozen=True, slots=True)
class PrefixAwareWeights:
    """Weights of PrefixAwarePolicy's score, chosen on one seed of benchmarks/routing.py.

    Fields:
        uncached: queued tokens that one token of extra prefill may save; above 1, because a
            duplicate also evicts, and delays whoever comes next.
        uncached_max: where that weight stops growing.
        backlog_tokens: it grows by 1 for each so many tokens that the shortest queue holds.
        inflight_tokens: queued tokens that an unfinished request counts as.
    """

    uncached: float = 2.0
    uncached_max: float = 8.0
    backlog_tokens: float = 1000.0
    inflight_tokens: float = 64.0


class PrefixAwarePolicy(RoutingPolicy):
    """The least  w / s * missing tokens + tokens queued + 64 * requests in flight.

    Missing tokens are those that this replica would have to compute although another holds
    them, by the index; tokens queued are those of others that it would have to compute first;
    requests in flight keep decodes from piling up where prompts are short. (What nobody holds
    costs the same everywhere.)

    w = min(8, 2 + shortest queue / 1000): when every replica is backed up, extra work is what
    must be avoided. s = 1 + waiting / holders: of the requests that begin with the part that is
    known and have no first token yet, so many wait at each of its copies; one more copy is made
    for as many, and they share its price. That makes a prefix spread as fast as it gets popular.

    Ties go to the shorter queue, then to the replica used longest ago. The result is the argmin
    over all replicas, found without looking at each: only those that hold a part of the prompt
    can beat the one with the least load, deepest match first, until no shallower match can be
    cheaper. (Measured with the simulator, benchmarks/routing.py.)
    """

    uses_index = True

    def __init__(
        self,
        slots: ReplicaSlots,
        index: PrefixIndex,
        clock: Clock,
        seed: int = 0,
        weights: PrefixAwareWeights | None = None,
    ):
        super().__init__(slots, index, clock, seed)
        self.weights = weights or PrefixAwareWeights()
        self.waiting = WaitingPrefixes()

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        loads = self.loads
        queued = loads.remaining()
        load = self._open_to(queued + self.weights.inflight_tokens * loads.inflight, exclude)
        best = idlest = loads.least(load)
        levels = self.index.match(request.page_hashes[: request.reusable_pages])
        chunk = list(islice(levels, _CHUNK))
        if not chunk or chunk[0][1] >> idlest & 1:
            return self.slots.name(idlest)
        depth, holders = chunk[0]
        weight = self._weight(queued.item(queued.argmin())) / self._sharers(request, depth, holders)
        page_cost = weight * request.page_size
        floor = load.item(idlest)
        best_score = floor + page_cost * depth
        while chunk:
            costs = [page_cost * (depth - n) for n, _ in chunk]
            # Deepest first: nothing in this chunk or behind it is cheaper than this.
            if floor + costs[0] >= best_score:
                break
            masks = [mask for _, mask in chunk]
            if masks[0] >> idlest & 1:
                best = idlest
                break
            if masks[-1].bit_count() > _FEW:
                # Few are both idle enough to win and deep enough to be here.
                idle = np.packbits(load < best_score - costs[0], bitorder="little")
                idle_mask = int.from_bytes(idle.tobytes(), "little")
                masks = [mask & idle_mask for mask in masks]
            if masks[-1].bit_count() <= _FEW:
                slot, score = self._cheapest_of_few(masks, costs, load)
            else:
                slot, score = self._cheapest_of_many(masks, costs, load)
            if score < best_score:
                best, best_score = slot, score
            chunk = list(islice(levels, _CHUNK))
        return self.slots.name(best)

    def on_dispatched(self, request: RouteRequest, replica: str) -> None:
        super().on_dispatched(request, replica)
        self.waiting.add(request, replica)

    def on_first_token(self, request_id: str) -> None:
        super().on_first_token(request_id)
        self.waiting.remove(request_id)

    def on_finished(self, request_id: str) -> None:
        super().on_finished(request_id)
        self.waiting.remove(request_id)

    def remove_replica(self, replica: str) -> None:
        super().remove_replica(replica)
        self.waiting.forget(replica)

    def _weight(self, backlog: float) -> float:
        weights = self.weights
        return min(weights.uncached_max, weights.uncached + backlog / weights.backlog_tokens)

    def _sharers(self, request: RouteRequest, depth: int, holders: int) -> float:
        """Requests that one more copy of the prompt's known part (depth pages) would serve."""
        return 1 + self.waiting.count(request, depth) / holders.bit_count()

    def _cheapest_of_few(
        self, masks: list[int], costs: list[float], load: NDArray[np.float64]
    ) -> tuple[int, float]:
        """Slot and score of the replica with the least cost + load; masks are nested."""
        last_used = self.loads.last_used
        best, best_score = -1, np.inf
        seen = 0
        for mask, cost in zip(masks, costs, strict=True):
            fresh = mask ^ seen
            seen = mask
            while fresh:
                low = fresh & -fresh
                fresh ^= low
                slot = low.bit_length() - 1
                score = cost + load.item(slot)
                if score < best_score or (
                    score == best_score and last_used[slot] < last_used[best]
                ):
                    best, best_score = slot, score
        return best, best_score

    def _cheapest_of_many(
        self, masks: list[int], costs: list[float], load: NDArray[np.float64]
    ) -> tuple[int, float]:
        """The same, with all replicas at once."""
        width = -(-len(load) // 8)
        packed = b"".join([mask.to_bytes(width, "little") for mask in masks])
        rows = np.frombuffer(packed, np.uint8).reshape(len(masks), width)
        bits = np.unpackbits(rows, axis=1, count=len(load), bitorder="little")
        # In how many sets each replica is: as they're nested, that tells the deepest.
        count = np.add.reduce(bits, axis=0, dtype=np.uint8)
        score = np.array([np.inf, *reversed(costs)])[count] + load
        slot = self.loads.least(score)
        return slot, score.item(slot)
