"""Manta's own policy: the cheapest place for a prompt, its queue included."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex, PrefixMatch
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest
from deploy.routing.waiting_prefixes import WaitingPrefixes

_FEW = 12
"""Replicas that are looked at one by one."""


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
    can beat the one with the least load, and each score that is known excludes those that hold
    too little or are too busy to have a lower one. (Measured with the simulator,
    benchmarks/routing.py.)
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
        load = loads.inflight * self.weights.inflight_tokens
        load += queued
        load = self._open_to(load, exclude)
        idlest = loads.least(load)
        match = self.index.match(request.page_hashes[: request.reusable_pages])
        if not match.ends:
            return self.slots.name(idlest)
        depth, holders = match.ends[-1], match.holders(len(match.ends) - 1)
        if holders >> idlest & 1:
            return self.slots.name(idlest)
        weight = self._weight(queued.item(queued.argmin())) / self._sharers(request, depth, holders)
        best = self._least_score(match, weight * request.page_size, load, idlest)
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

    def _least_score(
        self, match: PrefixMatch, page_cost: float, load: NDArray[np.float64], idlest: int
    ) -> int:
        """Slot with the least load + page_cost * pages that the deepest holders have beyond it."""
        ends, holders = match.ends, match.holders
        depth = ends[-1]
        best = idlest
        floor = load.item(idlest)
        best_score = floor + page_cost * depth
        last_used = self.loads.last_used
        others = holders(0)
        low = top = last = len(ends) - 1  # Who holds most comes first.
        while low <= top:
            least_cost = page_cost * (depth - ends[top])
            fresh = holders(low) & others
            if fresh.bit_count() > _FEW and top < last:
                others &= _mask_of(load < best_score - least_cost)
                fresh &= others
            if fresh.bit_count() > _FEW:
                same = holders(top) & others
                if same.bit_count() > _FEW:
                    low = top
                    fresh = 1 << self.loads.least(load, _flags_of(same, len(load)).nonzero()[0])
                while fresh.bit_count() > _FEW:
                    low = (low + top + 1) // 2
                    fresh = holders(low) & others
            others &= ~holders(low)
            while fresh:
                bit = fresh & -fresh
                fresh ^= bit
                slot = bit.bit_length() - 1
                slot_load = load.item(slot)
                if slot_load + least_cost > best_score:
                    continue
                # With less than ends[enough] pages it costs more than the best.
                enough = bisect_left(ends, depth - (best_score - slot_load) / page_cost, low, top)
                if not holders(enough) & bit:
                    continue
                deepest = _last_with(bit, holders, enough, top)
                score = slot_load + page_cost * (depth - ends[deepest])
                if score < best_score or (
                    score == best_score and last_used[slot] < last_used[best]
                ):
                    best, best_score = slot, score
            top = low - 1
            # Who holds fewer than ends[low] pages costs too much even if it's idle.
            low = bisect_right(ends, depth - (best_score - floor) / page_cost, 0, top + 1)
        return best


def _last_with(bit: int, holders: Callable[[int], int], low: int, high: int) -> int:
    """Last level in low..high where the bit is set: at low it is, and not after a gap."""
    while low < high:
        middle = (low + high + 1) // 2
        if holders(middle) & bit:
            low = middle
        else:
            high = middle - 1
    return low


def _mask_of(flags: NDArray[np.bool_]) -> int:
    """Bits by slot."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _flags_of(mask: int, count: int) -> NDArray[np.bool_]:
    packed = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
