"""Manta's own policy: the replica where a prompt costs least, its queue included."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.prefix_match import PrefixMatch
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest
from deploy.routing.waiting_prefixes import WaitingPrefixes

_FEW = 12
"""The most replicas whose scores are computed one by one; larger sets are narrowed first."""


@dataclass(frozen=True, slots=True)
class PrefixAwareWeights:
    """Weights of PrefixAwarePolicy's score, chosen on one seed of benchmarks/routing.py."""

    uncached: float = 2.0
    """w where some replica has no queue. It is above 1, because a second copy of a page also evicts
    another page, and delays the requests that come next."""
    uncached_max: float = 8.0
    """The most that w grows to."""
    backlog_tokens: float = 1000.0
    """w grows by 1 when the shortest queue grows by this number of tokens."""
    inflight_tokens: float = 64.0
    """An unfinished request counts as this number of queued tokens."""


class PrefixAwarePolicy(RoutingPolicy):
    """The replica with the least score, in tokens:

        score = w / s * missing + queued + 64 * in_flight + adapter
        w     = min(8, 2 + shortest queue / 1000)
        s     = 1 + waiting / holders

    missing: tokens that this replica would have to compute although another replica holds them.
    Tokens that no replica holds cost the same everywhere and don't count.

    queued: uncached tokens of earlier requests, which the replica has to compute first.

    in_flight: unfinished requests of the replica. Without them decodes would pile up where
    prompts are short.

    adapter: 8,000 where the request's adapter has to be read first, as much again where another
    one has to leave memory for it, and 2,048 where it has to wait for a slot (`AdapterBook`). So
    requests with an adapter gather where it is, and a hot one spreads once the queue there costs
    more.

    w: the price of computing a token again. When every queue is long, the fleet can't afford work
    that is done twice, so the price is higher.

    s: the number of requests that share the price of a new copy. `waiting` requests begin with the
    known prefix of this prompt and have no first token yet. `holders` replicas hold this prefix,
    so waiting / holders requests wait at each of them. A new copy will serve the same number, and
    this request. So the more requests wait for a prefix, the sooner it is copied.

    A flex request goes where least is under way, flex requests included. For the others these don't
    count.

    Ties go to the shorter queue, then to the replica used longest ago. The result is the least
    score of all replicas, but few scores are computed. A replica that holds nothing can't have a
    lower score than the one with the least load. Of the others, those that hold most come first.
    Each score found excludes the replicas that hold too little, or have too much load, for a
    lower score. (Measured with the simulator, benchmarks/routing.py.)
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
        if request.adapter:
            load += self.adapters.cost(request.adapter, len(load))
        if request.is_flex:
            load += self.flex_loads.inflight * self.weights.inflight_tokens
            load += self.flex_loads.remaining()
            return self.slots.name(self.flex_loads.least(self._open_to(load, exclude)))
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
        if not request.is_flex:
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
        """s of the score; the known prefix has `depth` pages."""
        return 1 + self.waiting.count(request, depth) / holders.bit_count()

    def _least_score(
        self, match: PrefixMatch, page_cost: float, load: NDArray[np.float64], idlest: int
    ) -> int:
        """Slot with the least load + page_cost * missing pages.

        `match` is not empty. `page_cost` is the price of a missing page in tokens. `load`
        [capacity] is the rest of the score, inf where no replica may be chosen. `idlest` is the
        slot with the least load; it doesn't hold the whole match.
        """
        ends, holders = match.ends, match.holders
        depth = ends[-1]
        best = idlest
        floor = load.item(idlest)
        best_score = floor + page_cost * depth
        last_used = self.loads.last_used
        others = holders(0)
        # Each round looks at the replicas whose deepest level is in low..top. Those with more
        # are done. `others` are the replicas that aren't done or excluded yet.
        low = top = last = len(ends) - 1
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
                # It beats the best only if it holds this level.
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
            # A replica without this level costs too much, even with the least load of all.
            low = bisect_right(ends, depth - (best_score - floor) / page_cost, 0, top + 1)
        return best


def _last_with(bit: int, holders: Callable[[int], int], low: int, high: int) -> int:
    """Last level in low..high where the bit is set. It is set at low, and from there on without
    a gap."""
    while low < high:
        middle = (low + high + 1) // 2
        if holders(middle) & bit:
            low = middle
        else:
            high = middle - 1
    return low


def _mask_of(flags: NDArray[np.bool_]) -> int:
    """flags [capacity] as bits by slot."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _flags_of(mask: int, count: int) -> NDArray[np.bool_]:
    """[count], the opposite of _mask_of."""
    packed = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
