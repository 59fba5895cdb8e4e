"""Manta's own policy: the cheapest place for a prompt, its queue included."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.prefix_match import PrefixMatch
from deploy.routing.replica_slots import ReplicaSlots
from deploy.routing.route_request import RouteRequest
from deploy.routing.waiting_prefixes import WaitingPrefixes


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
    can beat the one with the least load, and only as long as their load alone is no higher than
    the best score. (Measured with the simulator, benchmarks/routing.py.)
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
        best = loads.least(load)
        match = self.index.match(request.page_hashes[: request.reusable_pages])
        if match.holders and not match.holders[-1] >> best & 1:
            weight = self._weight(queued.item(queued.argmin())) / self._sharers(request, match)
            best = self._cheapest(match, load, weight * request.page_size, best)
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

    def _sharers(self, request: RouteRequest, match: PrefixMatch) -> float:
        """Requests that one more copy of the prompt's known part would be made for."""
        waiting = self.waiting.count(request, match.num_pages)
        return 1 + waiting / match.holders[-1].bit_count()

    def _cheapest(
        self, match: PrefixMatch, load: NDArray[np.float64], page_cost: float, idlest: int
    ) -> int:
        """Slot of the replica with the least score, the less loaded ones first."""
        last_used = self.loads.last_used
        most = match.num_pages
        best = idlest
        best_score = load.item(best) + page_cost * (most - match.pages_of(best))
        for slot in _slots_below(best_score, load, match.holders[0]):
            alone = load.item(slot)
            if alone > best_score:
                break
            # One page less than what can win, as the division rounds.
            at_least = most - 1 - (best_score - alone) / page_cost
            score = alone + page_cost * (most - match.pages_of(slot, at_least))
            if score < best_score or (
                score == best_score and last_used.item(slot) < last_used.item(best)
            ):
                best, best_score = slot, score
        return best


def _slots_below(limit: float, load: NDArray[np.float64], replicas: int) -> list[int]:
    """Those of some replicas (bits by slot) whose load is no higher, the least loaded first."""
    packed = replicas.to_bytes(-(-len(load) // 8), "little")
    among = np.unpackbits(np.frombuffer(packed, np.uint8), count=len(load), bitorder="little")
    slots = (among & (load <= limit)).nonzero()[0]
    ordered: list[int] = slots[load[slots].argsort(kind="stable")].tolist()
    return ordered
