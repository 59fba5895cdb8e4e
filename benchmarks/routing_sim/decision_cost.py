"""What a decision of the prefix-aware policy costs the router's event loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.routing_sim.simulator import SimClock
from deploy.routing import RouteRequest, RoutingPolicy, make_policy
from engine.kvcache import hash_pages
from engine.protocol.messages import BlockRemoved, BlockStored

PAGE_SIZE = 16
NUM_PAGES = 128
PROMPTS = 32
CALLS = 192
UPDATES = 16
SCENARIOS = ("unknown", "3 hold all", "all hold all", "all but 24", "ragged")


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """CPU microseconds of one thread; the best of many rounds of calls.

    Fields:
        sample_every: of the index, see PrefixIndex. Its default max_pages leads to 4 where 1,024
            replicas hold 200,000 tokens each.
        choose: one choice for a prompt of 128 pages whose hashes are known.
        book: on_dispatched, on_first_token and on_finished of it, i.e. its own pages in and out.
        update_page: one page of a cache event, the mean of storing and removing it.
    """

    num_replicas: int
    sample_every: int
    scenario: str
    choose: float
    book: float
    update_page: float


class Case(NamedTuple):
    """A case to measure; its fields are those of DecisionCost."""

    num_replicas: int
    sample_every: int
    scenario: str


def measure_decisions(cases: Sequence[Case], rounds: int) -> list[DecisionCost]:
    """Measure the cases in turn, so that a slow minute of the machine affects all of them."""
    works = [_prepare(*case) for case in cases]
    best = np.full((len(cases), 3), np.inf)
    for _ in range(rounds):
        best = np.minimum(best, [[_us(work) for work in row] for row in works])
    best /= [CALLS, CALLS, 2 * NUM_PAGES * UPDATES]
    return [DecisionCost(*case, *row) for case, row in zip(cases, best.tolist(), strict=True)]


def _prepare(
    num_replicas: int, sample_every: int, scenario: str
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """A fleet, and three kinds of work on it: choosing, booking, and taking in events."""
    rng = random.Random(num_replicas)
    policy = make_policy("prefix_aware", SimClock(), sample_every=sample_every)
    for number in range(num_replicas):
        policy.add_replica(str(number))
    requests = [_request(rng, f"prompt {number}") for number in range(PROMPTS)]
    for request in requests:
        _spread(policy, request, scenario, rng)
    for number in range(8 * num_replicas):
        short = RouteRequest(
            f"load {number}", np.zeros(rng.randint(1, 4000), np.int32), 16, np.empty(0, np.uint64)
        )
        policy.on_dispatched(short, str(rng.randrange(num_replicas)))
        if rng.random() < 0.7:
            policy.on_first_token(short.request_id)
    order = [requests[i % PROMPTS] for i in range(CALLS)]

    def choose_all() -> None:
        for request in order:
            policy.choose(request)

    def book_all() -> None:
        for request in order:
            policy.on_dispatched(request, "0")
            policy.on_first_token(request.request_id)
            policy.on_finished(request.request_id)

    fresh = [rng.getrandbits(64) for _ in range(NUM_PAGES)]

    def update_all() -> None:
        for _ in range(UPDATES):
            stored, removed = BlockStored(next_seq(), fresh, 0, ""), BlockRemoved(next_seq(), fresh)
            policy.index.apply("1", 1, [stored, removed])

    seq = [policy.index.seq_of("1")]

    def next_seq() -> int:
        seq[0] += 1
        return seq[0]

    return choose_all, book_all, update_all


def hashing_us() -> float:
    """Time of the page hashes of a prompt of 2,048 tokens, which each request needs once."""
    tokens = np.arange(PAGE_SIZE * NUM_PAGES, dtype=np.int32)

    def hash_all() -> None:
        for _ in range(20):
            hash_pages(tokens, PAGE_SIZE)

    return min(_us(hash_all) for _ in range(20)) / 20


def _request(rng: random.Random, name: str) -> RouteRequest:
    tokens = np.zeros(PAGE_SIZE * NUM_PAGES + 1, np.int32)
    hashes = np.array([rng.getrandbits(64) for _ in range(NUM_PAGES)], np.uint64)
    return RouteRequest(name, tokens, PAGE_SIZE, hashes)


def _spread(
    policy: RoutingPolicy, request: RouteRequest, scenario: str, rng: random.Random
) -> None:
    """Let replicas hold the prompt as the scenario says."""
    names = policy.slots.names
    depths = dict.fromkeys(names, NUM_PAGES)
    match scenario:
        case "unknown":
            depths = {}
        case "3 hold all":
            depths = dict.fromkeys(rng.sample(names, 3), NUM_PAGES)
        case "all but 24":
            for name in rng.sample(names, min(24, len(names) - 1)):
                del depths[name]
        case "ragged":
            depths = {name: rng.randint(1, NUM_PAGES) for name in names}
    for name, depth in depths.items():
        seq = policy.index.seq_of(name) + 1
        policy.index.apply(name, 1, [BlockStored(seq, request.page_hashes[:depth].tolist(), 0, "")])


def _us(work: Callable[[], object]) -> float:
    """CPU microseconds of this thread for one call of work."""
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1e3
