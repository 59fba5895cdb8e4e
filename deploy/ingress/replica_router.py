"""`ReplicaRouter`: which engine replica one ingress gives each request to."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.ingress.engine_watch import EngineWatch
from deploy.routing import ApplyResult, NoReplicaError, RouteRequest, RoutingPolicy
from engine.protocol.messages import KVEvents, KVSnapshot, Pong, SubscribeKVEvents
from engine.protocol.step import IntArray

logger = logging.getLogger(__name__)

AVOID_S = 5.0
"""A replica that lost a request, or to which Serve didn't give one, is avoided for this time."""
SILENCE_S = 5.0
"""A replica that has said nothing of its cache for this time is asked for a snapshot of all of it.
Its scheduler says something every second."""


class Route(NamedTuple):
    """`actor` is the name of the chosen replica's actor; "" leaves the choice to Serve.
    `page_hashes` is uint64 [num_pages]."""

    actor: str
    page_hashes: NDArray[np.uint64]


class ReplicaRouter:
    """Keeps a routing policy informed and asks it. Replicas are named by their inbox addresses.
    Use from one event loop.

    Replicas that haven't answered lately and those to be avoided are passed over: to pass over a
    replica that is well costs less than to wait for one that isn't.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        page_size: int,
        address: str,
        watch: EngineWatch,
    ) -> None:
        self.policy = policy
        self._page_size = page_size
        self._address = address
        self._watch = watch
        self._actors: dict[str, str] = {}
        self._avoided: dict[str, float] = {}
        """By replica: the time until which it is avoided."""
        self._heard: dict[str, float] = {}
        """By replica: when it last told of its cache, or was asked to."""
        self._open: dict[int, tuple[RouteRequest, str]] = {}
        """Requests under way by request id, and the replica that is believed to hold each."""

    def __len__(self) -> int:
        """Number of replicas that can be chosen."""
        return len(self._actors)

    def appeared(self, pong: Pong) -> None:
        """Note that a replica lives. Call this at each answer: it also asks again for cache
        contents that are missing."""
        now = self.policy.clock()
        if pong.replica not in self._actors:
            self._actors[pong.replica] = pong.actor
            self.policy.add_replica(pong.replica)
            if self.policy.uses_index:
                self._subscribe(pong.replica, now)
        elif self._heard.get(pong.replica, now) + SILENCE_S < now:
            self._subscribe(pong.replica, now)

    def vanished(self, replica: str) -> None:
        """Forget a replica that is gone, and its cache."""
        if self._actors.pop(replica, None) is not None:
            self.policy.remove_replica(replica)
        self._heard.pop(replica, None)
        self._avoided.pop(replica, None)

    def route(
        self,
        rid: int,
        input_ids: IntArray,
        namespace: str,
        adapter: str = "",
        *,
        is_flex: bool = False,
    ) -> Route:
        """Choose a replica for a request, and count the request there at once. `input_ids` [n] are
        prompt and output, `adapter` is the digest of its adapter."""
        request = RouteRequest.from_tokens(
            str(rid), input_ids, self._page_size, namespace, adapter, is_flex
        )
        try:
            replica = self.policy.choose(request, self._unfit())
        except NoReplicaError:
            self._open[rid] = (request, "")
            return Route("", request.page_hashes)
        self.policy.on_dispatched(request, replica)
        self._open[rid] = (request, replica)
        return Route(self._actors[replica], request.page_hashes)

    def taken(self, rid: int, replica: str) -> None:
        """Note which replica has taken the request: Serve may have chosen another one."""
        request, chosen = self._open.get(rid, (None, ""))
        if request is None or replica == chosen or replica not in self._actors:
            return
        if chosen:
            self._avoid(chosen)
        self.policy.on_dispatched(request, replica)
        self._open[rid] = (request, replica)

    def first_token(self, rid: int) -> None:
        """Note that the request's prefill is done."""
        self.policy.on_first_token(str(rid))

    def finished(self, rid: int, *, lost: bool = False) -> None:
        """Note that the attempt is over; `lost` if its replica failed it or gave it back."""
        _, replica = self._open.pop(rid, (None, ""))
        self.policy.on_finished(str(rid))
        if lost and replica:
            self._avoid(replica)

    def take_events(self, message: KVEvents) -> None:
        """Take what has changed in a replica's cache."""
        replica, index = message.replica, self.policy.index
        if replica not in self._actors:
            return
        result = index.apply(replica, message.epoch, message.events)
        if result is not ApplyResult.GAP:
            result = index.check_seq(replica, message.epoch, message.seq)
        self._after(replica, result)

    def take_snapshot(self, message: KVSnapshot) -> None:
        """Take all that a replica's cache holds."""
        if message.replica not in self._actors:
            return
        result = self.policy.index.load_snapshot(
            message.replica, message.epoch, message.seq, message.page_hashes.tolist()
        )
        self._after(message.replica, result)

    def _after(self, replica: str, result: ApplyResult) -> None:
        now = self.policy.clock()
        if result is ApplyResult.GAP:
            self._subscribe(replica, now)
        elif result is not ApplyResult.WAITING:  # a lost snapshot must be asked for again
            self._heard[replica] = now

    def _subscribe(self, replica: str, now: float) -> None:
        self._heard[replica] = now
        if not self._watch.send(replica, SubscribeKVEvents(self._address)):
            logger.warning("a replica can't be asked what its cache holds")

    def _avoid(self, replica: str) -> None:
        if replica in self._actors:
            self._avoided[replica] = self.policy.clock() + AVOID_S

    def _unfit(self) -> set[str]:
        """Replicas to pass over; empty if that would leave no replica."""
        unfit = self._watch.quiet
        if self._avoided:
            now = self.policy.clock()
            self._avoided = {r: until for r, until in self._avoided.items() if until > now}
            unfit = unfit | self._avoided.keys()
        return unfit if len(unfit & self._actors.keys()) < len(self._actors) else set()


def input_of(prompt_ids: IntArray, output_ids: IntArray | None) -> IntArray:
    """Tokens that a replica must compute or find in its cache: prompt, then output, [n]."""
    return prompt_ids if output_ids is None else np.concatenate([prompt_ids, output_ids])
