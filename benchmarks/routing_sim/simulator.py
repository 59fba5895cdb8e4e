"""Requests through routers to replicas, in simulated time."""

from __future__ import annotations

import enum
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.policies.multiplexed import RayMultiplexedPolicy
from benchmarks.routing_sim.replica import MAX_ADAPTERS, Replica, RunRecord
from benchmarks.routing_sim.trace import PAGE_SIZE, Trace, TraceRequest
from deploy.routing import ApplyResult, RouteRequest, RoutingPolicy, find_policy, make_policy
from deploy.routing.adapter_book import AdapterBook
from engine.protocol.messages import KVEvent

NOTICE_S = 0.005
TELL_S = 0.1
"""Between two reports of a replica's multiplexed models in Ray Serve
(PUSH_MULTIPLEXED_MODEL_IDS_INTERVAL_S)."""


class SimClock:
    """The time that policies read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and its routers.

    Fields:
        policy: a name in POLICIES.
        num_replicas, cache_tokens: the fleet.
        num_routers: ingress replicas, each with a policy of its own that knows only what it
            sent itself; requests come to them at random. Cache events reach all.
        event_delay_s: age of cache events when a router gets them.
        report_delay_s: with 0, a router books what it sends at once. Above 0 it doesn't: it hears
            of the request and of all that follows from the replica, with this delay.
        seed: of the policies and of the spread over routers.
    """

    policy: str
    num_replicas: int
    cache_tokens: int
    num_routers: int = 1
    event_delay_s: float = 0.05
    report_delay_s: float = 0.0
    seed: int = 0


class _Kind(enum.IntEnum):
    """Kinds of events, in the order in which events of one instant happen."""

    CACHE_EVENTS = 0
    DISPATCH_REPORT = 1
    FIRST_TOKEN_NOTICE = 2
    FINISH_NOTICE = 3
    PREFILL_END = 4
    DECODE_END = 5
    ADAPTER_READ = 6
    ARRIVAL = 7


class Simulator:
    """Runs a trace to its last request."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.clock = SimClock()
        events = find_policy(POLICIES[scenario.policy]).uses_index
        self.replicas = [
            Replica(number, scenario.cache_tokens, enable_events=events)
            for number in range(scenario.num_replicas)
        ]
        self.policies = [self._policy(number) for number in range(scenario.num_routers)]
        self.records: list[RunRecord] = []
        self._router_of: dict[int, RoutingPolicy] = {}
        self._random = random.Random(scenario.seed)
        self._heap: list[tuple[float, int, int, object]] = []
        self._count = 0

    def run(self) -> list[RunRecord]:
        """Every request of the trace, in the order of arrival."""
        for request in self.trace.requests:
            self._push(request.arrival, _Kind.ARRIVAL, request)
        while self._heap:
            now, kind, _, what = heapq.heappop(self._heap)
            self.clock.now = now
            self._handle(kind, what)
        return self.records

    def _handle(self, kind: int, what: object) -> None:
        match kind, what:
            case _Kind.ARRIVAL, TraceRequest():
                self._arrive(what)
            case _Kind.PREFILL_END, Replica():
                record = what.end_prefill(self.clock.now)
                self._notify(_Kind.FIRST_TOKEN_NOTICE, record)
                if len(record.request.output) == 1:
                    self._end_decodes(what)
                self._go_on(what)
            case _Kind.DECODE_END, (Replica() as replica, version):
                if version == replica.version:
                    self._end_decodes(replica)
                    self._go_on(replica)
            case _Kind.ADAPTER_READ, Replica():
                self._go_on(what)
            case _Kind.DISPATCH_REPORT, (RouteRequest() as route, str() as name):
                self._router_of[int(route.request_id)].on_dispatched(route, name)
            case _Kind.FIRST_TOKEN_NOTICE, RunRecord():
                self._router_of[what.request.number].on_first_token(str(what.request.number))
            case _Kind.FINISH_NOTICE, RunRecord():
                router = self._router_of.pop(what.request.number)
                router.on_finished(str(what.request.number))
            case _Kind.CACHE_EVENTS, (str() as name, events):
                for policy in self.policies:
                    if policy.uses_index:
                        result = policy.index.apply(name, 1, events)
                        if result is not ApplyResult.APPLIED:
                            raise RuntimeError(f"events of {name}: {result}")
            case _:
                raise AssertionError(f"no such event: {kind}")

    def _arrive(self, request: TraceRequest) -> None:
        policy = self.policies[0]
        if len(self.policies) > 1:
            policy = self._random.choice(self.policies)
        prompt = request.prompt()
        hashes = request.page_hashes()
        route = RouteRequest(str(request.number), prompt, PAGE_SIZE, hashes, request.adapter)
        name = policy.choose(route)
        self._router_of[request.number] = policy
        delay = self.scenario.report_delay_s
        if delay > 0:
            self._push(self.clock.now + delay, _Kind.DISPATCH_REPORT, (route, name))
        else:
            policy.on_dispatched(route, name)
        replica = self.replicas[int(name)]
        record = RunRecord(request, replica.number, prompt)
        self.records.append(record)
        replica.add(record, self.clock.now)
        self._go_on(replica)

    def _go_on(self, replica: Replica) -> None:
        """Schedule what follows a change of a replica: its next prefill, the next end of a decode,
        its cache events."""
        now = self.clock.now
        end = replica.try_prefill(now)
        if end is not None:
            self._push(end, _Kind.PREFILL_END, replica)
        elif not replica.prefilling and (read := replica.next_read(now)) is not None:
            self._push(read, _Kind.ADAPTER_READ, replica)
        replica.version += 1
        next_end = replica.next_end(now)
        if next_end is not None:
            self._push(next_end, _Kind.DECODE_END, (replica, replica.version))
        events: Sequence[KVEvent] = replica.drain_events()
        if events:
            delivery = (str(replica.number), events)
            self._push(now + self.scenario.event_delay_s, _Kind.CACHE_EVENTS, delivery)

    def _end_decodes(self, replica: Replica) -> None:
        for record in replica.end_decodes(self.clock.now):
            self._notify(_Kind.FINISH_NOTICE, record)

    def _notify(self, kind: _Kind, record: RunRecord) -> None:
        self._push(self.clock.now + NOTICE_S + self.scenario.report_delay_s, kind, record)

    def _push(self, at: float, kind: _Kind, what: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, kind, self._count, what))

    def _known_to_ray(self, name: str) -> list[str]:
        """The adapters that a replica has told Serve of: those that have been read."""
        read = self.replicas[int(name)].adapters.items()
        return [adapter for adapter, at in read if at + TELL_S <= self.clock.now]

    def _policy(self, number: int) -> RoutingPolicy:
        scenario = self.scenario
        word = POLICIES[scenario.policy]
        policy = make_policy(word, self.clock, seed=1000 * scenario.seed + number)
        policy.adapters = AdapterBook(MAX_ADAPTERS, MAX_ADAPTERS)
        for replica in self.replicas:
            policy.add_replica(str(replica.number))
        if isinstance(policy, RayMultiplexedPolicy):
            policy.held = self._known_to_ray
        return policy
