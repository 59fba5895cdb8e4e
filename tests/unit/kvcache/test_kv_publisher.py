"""KVPublisher: snapshots, numbered events, and a reader that ends up with what the tree holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.ingress.replica_router import SILENCE_S, ReplicaRouter
from deploy.routing import make_policy
from engine.kvcache import RadixCache, TokenToKVPoolAllocator, hash_pages
from engine.kvcache.kv_publisher import HEARTBEAT_S, PERIOD_S, KVPublisher
from engine.protocol import encoding
from engine.protocol.messages import KVEvents, KVSnapshot, Pong, SubscribeKVEvents

PAGE = 4


class Engine:
    """A tree, its publisher and what was sent, as bytes would carry it."""

    def __init__(self, events: bool = True) -> None:
        self.allocator = TokenToKVPoolAllocator(64 * PAGE, PAGE)
        self.tree = RadixCache(self.allocator, PAGE, enable_events=events)
        self.sent: list[tuple[str, Any]] = []
        self.deaf: set[str] = set()
        self.publisher = KVPublisher(self.tree, self._send)

    def _send(self, address: str, message: Any) -> bool:
        if address in self.deaf:
            return False
        frames = encoding.encode(message)
        self.sent.append((address, encoding.decode(frames, type(message))))
        return True

    def insert(self, tokens: list[int]) -> None:
        ids = np.array(tokens, np.int32)
        whole = len(ids) // PAGE * PAGE
        slots = self.allocator.alloc_extend([0], [whole], [-1])
        if slots is None:
            self.tree.evict(whole)
            slots = self.allocator.alloc_extend([0], [whole], [-1])
        if slots is None:
            return
        taken = self.tree.insert(ids[:whole], slots).prefix_len
        if taken:
            self.allocator.free(slots[:taken])

    def pages(self) -> set[int]:
        return {page for event in self.tree.snapshot()[1] for page in event.block_hashes}


def test_snapshot_comes_first_and_events_continue_it() -> None:
    engine = Engine()
    engine.insert(list(range(8)))
    engine.publisher.subscribe(SubscribeKVEvents("router", "replica"))
    ((to, snapshot),) = engine.sent
    assert to == "router" and isinstance(snapshot, KVSnapshot)
    assert snapshot.replica == "replica"
    assert sorted(snapshot.page_hashes.tolist()) == sorted(
        hash_pages(np.arange(8, dtype=np.int32), PAGE).tolist()
    )
    engine.insert(list(range(12)))
    engine.publisher.publish(1.0, is_idle=False)
    _, events = engine.sent[1]
    assert isinstance(events, KVEvents) and events.epoch == snapshot.epoch
    assert [event.seq for event in events.events] == [snapshot.seq + 1]


def test_events_wait_for_each_other_while_steps_run() -> None:
    engine = Engine()
    engine.publisher.subscribe(SubscribeKVEvents("router", "replica"))
    for step, is_idle in enumerate([False, False, False, True]):
        engine.insert([step] * PAGE)
        engine.publisher.publish(5.0 + step * PERIOD_S / 10, is_idle=is_idle)
    sent = [[e.seq for e in m.events] for _, m in engine.sent if isinstance(m, KVEvents)]
    assert sent == [[1], [2, 3, 4]]
    last = 5.0 + 3 * PERIOD_S / 10
    engine.publisher.publish(last + HEARTBEAT_S / 2, is_idle=True)
    assert len(engine.sent) == 3, "there was nothing to tell"
    engine.publisher.publish(last + PERIOD_S + HEARTBEAT_S, is_idle=True)
    beat = engine.sent[3][1]
    assert isinstance(beat, KVEvents) and (beat.seq, beat.events) == (4, [])


def test_subscribers_go() -> None:
    engine = Engine()
    for name in ("a", "b", "c"):
        engine.publisher.subscribe(SubscribeKVEvents(name, "replica"))
    engine.publisher.unsubscribe("a")
    engine.publisher.unsubscribe("unknown")
    engine.deaf.add("b")
    engine.insert([1] * PAGE)
    engine.publisher.publish(1.0, is_idle=True)
    assert [to for to, m in engine.sent if isinstance(m, KVEvents)] == ["c"]
    assert len(engine.publisher) == 1


def test_nothing_without_events() -> None:
    engine = Engine(events=False)
    engine.publisher.subscribe(SubscribeKVEvents("router", "replica"))
    engine.insert([1] * PAGE)
    engine.publisher.publish(1.0, is_idle=True)
    assert engine.sent == [] and len(engine.publisher) == 0


@settings(max_examples=100)
@given(data=st.data())
def test_router_knows_what_the_tree_holds(data: st.DataObject) -> None:
    """Whatever is stored and evicted, and whichever messages are lost."""
    engine = Engine()
    now = [0.0]
    policy = make_policy("prefix_aware", lambda: now[0])

    def send(replica: str, message: Any) -> bool:
        message.replica = replica
        engine.publisher.subscribe(message)
        return True

    watch = SimpleNamespace(send=send, quiet=set())
    router = ReplicaRouter(policy, PAGE, "router", watch)
    inbox = engine.sent

    def read(*, losing: bool) -> None:
        while inbox:
            _, message = inbox.pop(0)
            if losing and data.draw(st.booleans()):
                continue
            if isinstance(message, KVSnapshot):
                router.take_snapshot(message)
            else:
                router.take_events(message)

    pong = Pong("replica", "actor", "", "", 1, 1)
    router.appeared(pong)
    read(losing=False)
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["insert", "insert", "evict", "reset", "publish"])):
            case "insert":
                length = data.draw(st.integers(1, 5)) * PAGE
                bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
                engine.insert(data.draw(bits))
            case "evict":
                engine.tree.evict(data.draw(st.integers(1, 32)))
            case "reset":
                engine.tree.reset()
            case "publish":
                engine.publisher.publish(0.0, is_idle=True)
                read(losing=True)
    # Now messages arrive, and the first tells what was missed. A snapshot that was lost is asked
    # for when nothing has been heard for a while.
    now[0] += 2 * SILENCE_S
    router.appeared(pong)
    engine.publisher.publish(1e9, is_idle=True)
    read(losing=False)
    assert policy.index.pages_of("replica") == engine.pages()
