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
    """The least  w * uncached tokens + tokens queued + 64 * requests in flight.

    Uncached tokens are the prompt's that this replica would have to compute, by the index;
    tokens queued are those of others that it would have to compute first; requests in flight
    keep decodes from piling up where prompts are short. w = min(8, 2 + shortest queue / 1000):
    when every replica is backed up, extra work is what must be avoided. Ties go to the shorter
    queue, then to the replica used longest ago.

    The result is the argmin over all replicas, found without looking at each: only those that
    hold a part of the prompt can beat the one with the least load, deepest match first, until
    no shallower match can be cheaper. (Measured with the simulator, benchmarks/routing.py.)
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

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        weights, loads = self.weights, self.loads
        queued = loads.remaining()
        load = self._open_to(queued + weights.inflight_tokens * loads.inflight, exclude)
        backlog = queued.item(queued.argmin())
        weight = self._weight(backlog)
        best = idlest = loads.least(load)
        floor = load.item(best)
        best_score = floor + weight * request.num_tokens
        levels = self.index.match(request.page_hashes[: request.reusable_pages])
        while chunk := list(islice(levels, _CHUNK)):
            costs = [weight * (request.num_tokens - n * request.page_size) for n, _ in chunk]
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
        return self.slots.name(best)

    def _weight(self, backlog: float) -> float:
        weights = self.weights
        return min(weights.uncached_max, weights.uncached + backlog / weights.backlog_tokens)

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
