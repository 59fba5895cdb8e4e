"""ReplicaRouter: affinity, where requests really are, and replicas that had better be passed over;
ChosenReplicaRouter: Serve's side of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID

from deploy.ingress.replica_router import AVOID_S, SILENCE_S, ReplicaRouter, input_of
from deploy.replica.request_router import ChosenReplicaRouter, ranks
from deploy.routing import make_policy
from engine.kvcache import hash_pages
from engine.protocol.messages import BlockStored, KVEvents, KVSnapshot, Pong, SubscribeKVEvents
from engine.protocol.step import IntArray

PAGE = 4
PROMPT = np.arange(41, dtype=np.int32)


class Setting:
    """A router of `count` replicas r0, r1, ... whose actors are a0, a1, ..."""

    def __init__(self, count: int = 3) -> None:
        self.now = 100.0
        self.quiet: set[str] = set()
        self.sent: list[tuple[str, Any]] = []
        policy = make_policy("prefix_aware", lambda: self.now)
        self.router = ReplicaRouter(policy, PAGE, "me", self)
        self._rid = 0
        for number in range(count):
            self.appear(number)

    def send(self, replica: str, message: Any) -> bool:
        self.sent.append((replica, message))
        return True

    def appear(self, number: int) -> None:
        self.router.appeared(Pong(f"r{number}", f"a{number}", "", "", 1, 1))

    def hold(self, number: int, tokens: IntArray, seq: int = 1) -> None:
        hashes = hash_pages(tokens, PAGE)
        self.router.take_snapshot(KVSnapshot(f"r{number}", 1, seq, hashes))

    def route(self, tokens: IntArray = PROMPT, namespace: str = "") -> tuple[int, str]:
        self._rid += 1
        return self._rid, self.router.route(self._rid, tokens, namespace).actor

    def load(self, replica: str) -> tuple[float, float]:
        policy = self.router.policy
        slot = policy.slots.slot(replica)
        return policy.loads.queued.item(slot), policy.loads.inflight.item(slot)


def test_request_goes_where_its_prefix_is() -> None:
    setting = Setting()
    assert setting.sent == [(f"r{i}", SubscribeKVEvents("me")) for i in range(3)]
    setting.hold(1, PROMPT)
    rid, actor = setting.route()
    assert actor == "a1"
    assert setting.load("r1") == (1, 1), "10 of 10 whole pages are cached, of 41 tokens"
    assert setting.route(namespace="other")[1] != "a1"
    setting.router.first_token(rid)
    assert setting.load("r1") == (0, 1)
    setting.router.finished(rid)
    assert setting.load("r1") == (0, 0)


def test_hashes_are_handed_on() -> None:
    setting = Setting()
    handed = setting.router.route(1, PROMPT, "salt").page_hashes
    assert handed.tolist() == hash_pages(PROMPT, PAGE, "salt").tolist()


def test_no_replica_leaves_it_to_serve() -> None:
    setting = Setting(0)
    rid, actor = setting.route()
    assert actor == ""
    setting.appear(0)
    setting.router.taken(rid, "r0")
    assert setting.load("r0") == (41, 1)
    setting.router.finished(rid)
    assert setting.load("r0") == (0, 0)


def test_request_that_serve_put_elsewhere_counts_there() -> None:
    setting = Setting(2)
    setting.hold(0, PROMPT)
    rid, actor = setting.route()
    assert actor == "a0"
    setting.router.taken(rid, "r1")
    assert setting.load("r0") == (0, 0) and setting.load("r1") == (41, 1)
    # Serve had its reasons: for a while the others are taken.
    assert setting.route()[1] == "a1"
    setting.now += AVOID_S + 1
    assert setting.route()[1] == "a0"


def test_replica_that_lost_a_request_is_passed_over() -> None:
    setting = Setting(2)
    setting.hold(0, PROMPT)
    rid, _ = setting.route()
    setting.router.finished(rid, lost=True)
    assert setting.route()[1] == "a1"


def test_quiet_replicas_are_passed_over_unless_all_are() -> None:
    setting = Setting(2)
    setting.hold(0, PROMPT)
    setting.quiet = {"r0"}
    assert setting.route()[1] == "a1"
    setting.quiet = {"r0", "r1"}
    assert setting.route()[1] == "a0"


def test_replica_that_has_gone_is_forgotten() -> None:
    setting = Setting(2)
    setting.hold(0, PROMPT)
    rid, _ = setting.route()
    setting.router.vanished("r0")
    setting.router.vanished("unknown")
    assert len(setting.router) == 1
    assert setting.route()[1] == "a1"
    setting.router.first_token(rid)
    setting.router.finished(rid, lost=True)
    # One that comes under the same address is new, and empty.
    setting.appear(0)
    assert setting.router.policy.index.pages_of("r0") == frozenset()


def test_gap_asks_for_a_snapshot_and_a_lost_one_is_asked_for_again() -> None:
    setting = Setting(1)
    setting.hold(0, PROMPT)
    setting.sent.clear()
    page = hash_pages(np.full(PAGE, 9, np.int32), PAGE).tolist()
    setting.router.take_events(KVEvents("r0", 1, 5, [BlockStored(5, page, 0, "")]))
    assert setting.sent == [("r0", SubscribeKVEvents("me"))]
    setting.appear(0)
    assert len(setting.sent) == 1
    setting.now += SILENCE_S + 0.1
    setting.appear(0)
    assert len(setting.sent) == 2
    setting.hold(0, PROMPT, seq=4)
    index = setting.router.policy.index
    assert index.pages_of("r0") == {*page, *hash_pages(PROMPT, PAGE).tolist()}
    assert index.seq_of("r0") == 5


def test_silence_about_the_cache_is_ended_by_asking() -> None:
    """The scheduler may have dropped this router as one that doesn't read."""
    setting = Setting(1)
    setting.hold(0, PROMPT)
    setting.sent.clear()
    for _ in range(4):
        setting.now += SILENCE_S / 2
        setting.router.take_events(KVEvents("r0", 1, 1, []))
        setting.appear(0)
    assert setting.sent == []
    setting.now += SILENCE_S + 0.1
    setting.appear(0)
    assert setting.sent == [("r0", SubscribeKVEvents("me"))]


def test_loss_of_the_newest_event_is_noticed() -> None:
    setting = Setting(1)
    setting.hold(0, PROMPT)
    setting.sent.clear()
    setting.router.take_events(KVEvents("r0", 1, 3, []))
    assert setting.sent == [("r0", SubscribeKVEvents("me"))]


def test_input_is_prompt_and_output() -> None:
    assert input_of(PROMPT, None) is PROMPT
    assert input_of(PROMPT[:2], PROMPT[5:7]).tolist() == [0, 1, 5, 6]


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("engine", "llm")))


REPLICAS = [replica(f"id{i}") for i in range(5)]
ACTORS = [r.replica_id.to_full_id_str() for r in REPLICAS]


def test_serves_candidates_in_ranks() -> None:
    first, second = ranks(REPLICAS, ACTORS[3])
    assert first == [REPLICAS[3]]
    assert len(second) == 2 and REPLICAS[3] not in second
    for gone in ("", "SERVE_REPLICA::llm#engine#gone"):
        (only,) = ranks(REPLICAS, gone)
        assert len(only) == 2
    assert ranks(REPLICAS[:1], ACTORS[0]) == [[REPLICAS[0]]]
    assert ranks([], ACTORS[0]) == []


@pytest.mark.parametrize("args", [(), (b"x", "ingress"), (b"x", "ingress", 3)])
def test_any_replica_will_do_without_a_choice(args: tuple[Any, ...]) -> None:
    router = ChosenReplicaRouter.__new__(ChosenReplicaRouter)
    pending = SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))
    (rank,) = asyncio.run(router.choose_replicas(REPLICAS, pending))
    assert len(rank) == 2
    assert pending.routing_context.should_backoff


def test_serves_router_never_raises() -> None:
    router = ChosenReplicaRouter.__new__(ChosenReplicaRouter)
    broken = [SimpleNamespace(replica_id=None)]
    pending = SimpleNamespace(args=(b"", "", "x"), routing_context=SimpleNamespace())
    assert asyncio.run(router.choose_replicas(broken, pending)) == [broken]
    assert asyncio.run(router.choose_replicas(REPLICAS, None)) == [REPLICAS]
