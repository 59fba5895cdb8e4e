"""Messages arrive in order by whichever lane; strangers and garbage don't get in."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineDeadError
from engine.protocol import encoding, local_socket, messages
from engine.protocol.messages import AbortRequest, AddRequest, ReaderGone
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.transport import HEAD, KINDS, Address, Inbox, Order, Outbox, Waiter
from tests.support.requests import add_request

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture(params=["both lanes", "ZeroMQ alone"])
def context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    if request.param == "ZeroMQ alone":
        monkeypatch.setattr(local_socket.sys, "platform", "darwin")
    made: Context = zmq.Context()
    yield made
    made.term()


@contextlib.contextmanager
def without_datagrams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is made meanwhile has no sockets for them, as on another system or node."""
    with monkeypatch.context() as patch:
        patch.setattr(local_socket.sys, "platform", "darwin")
        yield


def rids(inbox: Inbox, count: int) -> list[int]:
    got = [inbox.recv(5.0) for _ in range(count)]
    return [m.rid for m in got if m is not None]


def test_inbox_takes_only_messages_with_its_secret(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(context=context)
    friend = Outbox(inbox.address, context)
    address = Address.parse(inbox.address)
    stranger = Outbox(str(address._replace(secret=bytes(16))), context)
    for _ in range(3):
        stranger.send(messages.Shutdown())
    friend.send(ReaderGone("c"))
    assert inbox.recv(5.0) == ReaderGone("c")
    assert inbox.recv(0.3) is None
    assert inbox.refused == 3
    assert len(caplog.records) == 1, "one line a minute"
    friend.close()
    stranger.close()
    inbox.close()


def test_connections_without_the_key_bring_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither memory nor messages: ZeroMQ itself drops them."""
    inbox = Inbox(context=context)
    address = Address.parse(inbox.address)
    other_key, _ = zmq.curve_keypair()
    with without_datagrams(monkeypatch):
        stranger = Outbox(str(address._replace(key=other_key)), context)
    plain = context.socket(zmq.PUSH)
    plain.setsockopt(zmq.SNDHWM, 2)
    plain.setsockopt(zmq.IMMEDIATE, 1)
    plain.connect(address.endpoint)
    assert not stranger.is_local
    stranger.send(messages.Shutdown())
    with pytest.raises(zmq.Again):  # no connection was ever made
        time.sleep(0.2)
        plain.send(b"x" * 100, zmq.NOBLOCK)
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
        raw.sendall(b"\xff" * 64)
        for _ in range(100):
            raw.sendall(b"\xff" * 100_000)
    friend = Outbox(inbox.address, context)
    friend.send(ReaderGone("c"))
    assert inbox.recv(5.0) == ReaderGone("c")
    assert inbox.recv(0.3) is None and inbox.refused == 0
    plain.close(0)
    stranger.close(0)
    for end in (friend, inbox):
        end.close()


def test_too_large_a_message_is_refused_where_it_is_sent(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(context=context)
    outbox = Outbox(inbox.address, context)
    monkeypatch.setattr("engine.protocol.transport.MAX_BYTES", 100_000)
    with pytest.raises(ValueError, match="more than 100000 bytes"):
        outbox.send(ReaderGone("c" * 100_001))
    outbox.send(ReaderGone("c"))
    assert inbox.recv(5.0) == ReaderGone("c")
    outbox.close()
    inbox.close()


def test_what_goes_over_the_network_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener between the two, as tcpdump would be: no word of the message is in the bytes."""
    context: Context = zmq.Context()
    inbox = Inbox(context=context)
    address = Address.parse(inbox.address)
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seen = bytearray()
        thread = threading.Thread(target=_relay, args=(listener, (host, int(port)), seen))
        thread.start()
        between = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with without_datagrams(monkeypatch):
            outbox = Outbox(str(address._replace(endpoint=between)), context)
        assert not outbox.is_local
        outbox.send(ReaderGone("a secret prompt"))
        assert inbox.recv(5.0) == ReaderGone("a secret prompt")
        outbox.close()
        inbox.close()
        context.term()
        thread.join(10)
    assert b"CURVE" in seen and len(seen) > 200
    assert b"prompt" not in seen and address.secret not in seen


def _relay(listener: socket.socket, target: tuple[str, int], seen: bytearray) -> None:
    """Pass on one connection until either side closes; `seen` gets the sender's bytes."""
    sender, _ = listener.accept()
    with sender, socket.create_connection(target) as receiver:
        ends = {sender: receiver, receiver: sender}
        while True:
            for end in select.select(list(ends), [], [])[0]:
                try:
                    data = end.recv(65536)
                except OSError:
                    return
                if not data:
                    return
                if end is sender:
                    seen += data
                ends[end].sendall(data)


def datagrams_to(inbox: Inbox) -> socket.socket:
    raw = local_socket.connect(Address.parse(inbox.address).secret)
    assert raw is not None
    return raw


def head_for(inbox: Inbox, kind: type, sender: bytes, number: int, num_frames: int) -> bytes:
    secret = Address.parse(inbox.address).secret
    return HEAD.pack(secret, KINDS.index(kind), sender, number, num_frames)


def test_datagrams_without_the_secret_are_refused() -> None:
    inbox = Inbox()
    raw = datagrams_to(inbox)
    # Who knows the public name alone.
    frames = encoding.encode(messages.Shutdown())
    head = HEAD.pack(bytes(16), KINDS.index(messages.Shutdown), b"stranger", 1, len(frames))
    assert local_socket.send(raw, head, frames)
    for data in (b"", b"\xff" * 4, b"\xff" * 200):
        raw.send(data)
    assert local_socket.send(raw, b"short", [b""])
    friend = Outbox(inbox.address)
    friend.send(ReaderGone("c"))
    assert inbox.recv(5.0) == ReaderGone("c")
    assert inbox.recv(0.0) is None
    assert inbox.refused == 5
    for end in (raw, friend, inbox):
        end.close()


def test_messages_of_one_sender_keep_their_order(context: Context) -> None:
    """More than fit a datagram queue, of sizes that take either lane."""
    inbox = Inbox(context=context)
    outbox = Outbox(inbox.address, context)
    for i in range(500):
        size = 40_000 if i % 7 == 0 else 3
        ids = np.arange(size, dtype=np.int32)
        outbox.send(add_request(rid=i, input_ids=ids, params=SamplingParams()))
    assert rids(inbox, 500) == list(range(500))
    outbox.close()
    assert inbox.recv(0.2) is None and inbox.refused == 0
    inbox.close()


def test_a_sender_on_this_node_uses_datagrams() -> None:
    inbox = Inbox()
    outbox = Outbox(inbox.address)
    outbox.send(AbortRequest(rid=5))
    assert outbox.is_local
    _, datagrams = inbox.fds
    with socket.socket(fileno=os.dup(datagrams)) as local:
        assert len(local.recv(local_socket.BUFFER_BYTES)) > HEAD.size
    outbox.close()
    inbox.close()


def test_datagrams_of_several_frames() -> None:
    """As they come; with wrong sizes they are refused, and the sender's next one is taken."""
    inbox = Inbox()
    outbox = Outbox(inbox.address)
    assert outbox.is_local
    ids = np.arange(5_000, dtype=np.int32)
    request = add_request(rid=1, input_ids=ids, params=SamplingParams())
    frames = encoding.encode(request)
    assert len(frames) == 2
    outbox.send(request)
    received = inbox.recv(5.0)
    assert isinstance(received, AddRequest)
    np.testing.assert_array_equal(received.sequence.prompt_ids, ids)
    raw = datagrams_to(inbox)
    for number, broken in enumerate(([frames[0]], [frames[0], frames[1][:-1]]), 2):
        head = head_for(inbox, AddRequest, outbox.sender, number, 2)
        sizes = b"".join(len(frame).to_bytes(4, "little") for frame in frames)
        raw.send(head + sizes + b"".join(broken))
    head = head_for(inbox, AbortRequest, outbox.sender, 4, 1)
    assert local_socket.send(raw, head, encoding.encode(AbortRequest(rid=4)))
    assert inbox.recv(5.0) == AbortRequest(rid=4)
    assert inbox.refused == 2
    for end in (raw, outbox, inbox):
        end.close()


def test_the_goodbye_leaves_no_state() -> None:
    inbox = Inbox()
    for i in range(5):
        outbox = Outbox(inbox.address)
        outbox.send(AbortRequest(rid=i))
        outbox.close()
    assert rids(inbox, 5) == list(range(5))
    assert inbox.recv(0.1) is None
    assert inbox.is_settled
    inbox.close()


def test_bad_messages_hold_nothing_up() -> None:
    inbox = Inbox()
    outbox = Outbox(inbox.address)
    outbox.send_frames(AbortRequest, [b"\xc1"])
    outbox.send(AbortRequest(rid=2))
    assert rids(inbox, 1) == [2] and inbox.refused == 1
    outbox.close()
    inbox.close()


def test_waiting_for_several_inboxes() -> None:
    a, b = Inbox(), Inbox()
    waiter = Waiter(a, b)
    assert waiter.wait(0.01) == []
    outbox = Outbox(b.address)
    outbox.send(AbortRequest(rid=1))
    assert waiter.wait(5.0) == [b]
    assert rids(b, 1) == [1]
    assert waiter.wait(0.01) == []
    for end in (outbox, a, b):
        end.close()


def test_waiting_never_asks_the_system_for_more_than_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`poll` rounds fractions of a millisecond up, and the worker would report a step late."""
    asked: list[float] = []

    class Poll:
        def register(self, fd: int, events: int) -> None: ...

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            if timeout_ms:  # 0 only looks
                asked.append(timeout_ms)
            now[0] += timeout_ms / 1000
            return []

    now = [100.0]
    monkeypatch.setattr("engine.protocol.transport.time.monotonic", lambda: now[0])
    monkeypatch.setattr("engine.protocol.transport.select.poll", Poll)
    inbox = Inbox()
    assert inbox.recv(0.0127) is None
    assert inbox.recv(0.0007) is None
    assert asked == [12]
    inbox.close()


def test_messages_already_taken_are_not_slept_on() -> None:
    """One that came early makes two due at once; a waiter must see the second."""
    inbox = Inbox()
    outbox, raw = Outbox(inbox.address), datagrams_to(inbox)
    head = head_for(inbox, AbortRequest, outbox.sender, 2, 1)
    assert local_socket.send(raw, head, encoding.encode(AbortRequest(rid=2)))
    assert inbox.recv(0.05) is None
    large = np.arange(local_socket.MAX_BYTES, dtype=np.int32)  # goes by ZeroMQ
    outbox.send(add_request(rid=1, input_ids=large, params=SamplingParams()))
    assert rids(inbox, 1) == [1]
    assert Waiter(inbox).wait(5.0) == [inbox]
    assert rids(inbox, 1) == [2]
    for end in (raw, outbox, inbox):
        end.close()


@given(st.permutations(range(1, 12)))
def test_order_is_the_numbers_whatever_the_arrival(arrival: list[int]) -> None:
    order = Order()
    got = [m for n in arrival for m in order.put(b"a", n, n, is_last=n == 11)]
    assert got == list(range(1, 12))
    assert order.is_empty


def test_senders_do_not_wait_for_each_other() -> None:
    order = Order()
    assert order.put(b"a", 2, "early", is_last=False) == []
    assert order.put(b"b", 1, "other", is_last=False) == ["other"]
    assert order.put(b"a", 1, "first", is_last=False) == ["first", "early"]


def test_a_receiver_that_never_reads_counts_as_dead(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.protocol.transport.SEND_LIMIT", 10)
    inbox = Inbox(context=context)
    outbox = Outbox(inbox.address, context)
    inbox.close()
    with pytest.raises(EngineDeadError):
        for i in range(100):
            outbox.send(AbortRequest(rid=i))
    outbox.close(0)


def test_a_receiver_elsewhere_is_reached_by_zeromq_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    with without_datagrams(monkeypatch):  # as if in another network namespace
        elsewhere = Inbox()
    outbox = Outbox(elsewhere.address)
    assert not outbox.is_local
    outbox.send(AbortRequest(rid=1))
    assert rids(elsewhere, 1) == [1]
    outbox.close()
    for end in (inbox, elsewhere):
        end.close()


def test_names_tell_nothing_of_the_secret() -> None:
    secret = b"s" * 16
    bound = local_socket.bind(secret)
    assert bound is not None
    name = bound.getsockname()
    assert isinstance(name, bytes) and secret not in name and secret.hex().encode() not in name
    bound.close()
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX, 2) as raw:
        raw.connect(name)
