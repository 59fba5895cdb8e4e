"""Messages between the roles: one `Inbox` per role, an `Outbox` to each inbox it talks to.

An `address` holds a secret, which every message carries (messages without it are ignored), and the
inbox's public key: ZeroMQ encrypts with it (CURVE) and takes nothing of a connection that doesn't
know it. Addresses are handed out through Ray (or by a parent process), never guessed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from engine.errors import EngineDeadError
from engine.protocol import adapters, encoding, local_socket, messages, step, tokenizer_messages

logger = logging.getLogger(__name__)

SEND_LIMIT = 10_000
"""A receiver that has more messages unread, twice as many at most, counts as dead."""
MAX_BYTES = 2**28
"""Of one message. The largest are prompts and log-probabilities: some megabytes."""
REFUSED_LOG_S = 60.0
"""Refused messages are logged this often at most."""

KINDS: tuple[type[Any], ...] = (
    messages.AddRequest,
    messages.AbortRequest,
    step.ModelWorkerBatch,
    step.SampleMasks,
    step.GenerationBatchResult,
    messages.StepOutputs,
    messages.Shutdown,
    messages.WorkerReady,
    messages.ReaderGone,
    messages.RequestsDone,
    messages.RequestTaken,
    messages.Ping,
    messages.Pong,
    messages.SubscribeKVEvents,
    messages.UnsubscribeKVEvents,
    messages.KVSnapshot,
    messages.KVEvents,
    messages.FlushCache,
    messages.CacheFlushed,
    tokenizer_messages.EncodeRequest,
    tokenizer_messages.EncodeReply,
    tokenizer_messages.DecodeRequest,
    tokenizer_messages.DecodeReply,
    tokenizer_messages.ChatRequest,
    tokenizer_messages.Register,
    tokenizer_messages.Registered,
    tokenizer_messages.Unregister,
    tokenizer_messages.TextOutputs,
    messages.IngressMetrics,
    messages.ExpertTokens,
    adapters.LoadAdapter,
    adapters.DropAdapter,
    adapters.AdapterLoaded,
    adapters.PrepareAdapter,
    adapters.AdapterPrepared,
)
"""All kinds of messages; the place of one is its code."""
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_BYE = 255
"""Code of a sender's last message, which has no body."""

HEAD = struct.Struct("<16sB8sQH")
"""Secret, code of the message's kind, sender, its number (0 where order is ZeroMQ's alone), and
how many frames follow."""


class Address(NamedTuple):
    """`endpoint` is ZeroMQ's; `key` the receiver's public key, as ZeroMQ writes keys (Z85)."""

    endpoint: str
    secret: bytes
    key: bytes

    @classmethod
    def parse(cls, address: str) -> Address:
        endpoint, _, hidden = address.partition("#")
        secret, key = bytes.fromhex(hidden[:32]), bytes.fromhex(hidden[32:])
        return cls(endpoint, secret, z85.encode(key))

    def __str__(self) -> str:
        return f"{self.endpoint}#{self.secret.hex()}{z85.decode(self.key).hex()}"


class Inbox:
    """Receives messages of any kind from any number of senders, in order per sender.

    It binds one explicit address on a random port for ZeroMQ. On the same node it also takes
    datagrams (`local_socket`), which arrive sooner.
    """

    def __init__(self, host: str = "127.0.0.1", context: zmq.Context[Any] | None = None) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.PULL)
        public_key, secret_key = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_secretkey = secret_key
        self._socket.setsockopt(zmq.RCVHWM, SEND_LIMIT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._secret = secrets.token_bytes(16)
        self._local = local_socket.bind(self._secret)
        self._buffer = memoryview(bytearray(local_socket.BUFFER_BYTES))
        self.fds = [int(self._socket.getsockopt(zmq.FD))]
        """Descriptors to watch for reading after `has_message` returned False: ZeroMQ's, then the
        datagrams'."""
        if self._local is not None:
            self.fds.append(self._local.fileno())
        self._signals = select.poll()
        for fd in self.fds:
            self._signals.register(fd, select.POLLIN)
        self._zmq_may_have = True
        """Whether ZeroMQ may have a message. Its descriptor only tells of changes: after a change,
        ask until there is none."""
        self.address = str(Address(f"tcp://{host}:{port}", self._secret, public_key))
        self.refused = 0
        """Number of messages dropped for a wrong secret or shape."""
        self._refused_logged = -math.inf
        self._order = Order()
        self._due: deque[Any] = deque()
        self._waiter = Waiter(self)

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    @property
    def is_settled(self) -> bool:
        """Whether all senders by datagram have said goodbye, and no message waits for another."""
        return self._order.is_empty

    def has_message(self) -> bool:
        """Whether `recv` would return a message at once."""
        while not self._due:
            # One system call; mostly there is no message. Asking ZeroMQ takes ten times the time.
            if not self._receive([fd for fd, _ in self._signals.poll(0)]):
                return False
        return True

    def has_message_at(self, readable: Collection[int]) -> bool:
        """As `has_message`, after that returned False. `readable` are the `fds` that are readable
        now."""
        return self._receive(readable) and self.has_message()

    def recv(self, timeout_s: float | None = 0.0) -> Any | None:
        """The next message; None if none came in time (None = wait for ever)."""
        there = self.has_message() if timeout_s == 0.0 else self._waiter.wait(timeout_s)
        return self._due.popleft() if there else None

    def close(self) -> None:
        """Close the sockets; queued messages are dropped."""
        self._socket.close(0)
        if self._local is not None:
            self._local.close()

    def _receive(self, readable: Collection[int]) -> bool:
        """Take a message from each socket that has one; False if there is none."""
        took_any = False
        if self._zmq_may_have or self.fds[0] in readable:
            took_any = self._receive_zmq()
        if self._local is not None and self.fds[1] in readable:
            took_any = self._receive_local(self._local) or took_any
        return took_any

    def _receive_local(self, local: socket.socket) -> bool:
        data = local_socket.receive(local, self._buffer)
        if data is None:
            return False
        self._take(data[: HEAD.size], [data[HEAD.size :]])
        return True

    def _receive_zmq(self) -> bool:
        self._zmq_may_have = bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)
        if not self._zmq_may_have:
            return False
        head, *body = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        self._take(head, body)
        return True

    def _take(self, head: memoryview, body: Sequence[memoryview]) -> None:
        """Take a message; `body` holds its frames, or a datagram's frames joined to one."""
        if len(head) != HEAD.size:
            self._refuse("wrong shape")
            return
        secret, code, sender, number, count = HEAD.unpack(head)
        if not secrets.compare_digest(secret, self._secret):
            self._refuse("wrong secret")
            return
        message = None if code == _BYE else self._parse(code, count, body)
        if number == 0:
            ready = [message]
        else:
            ready = self._order.put(sender, number, message, is_last=code == _BYE)
        for due in ready:
            if due is not None:
                self._due.append(due)

    def _parse(self, code: int, count: int, body: Sequence[memoryview]) -> Any | None:
        """A message of `count` frames; None (counted) if it isn't one of ours."""
        try:
            if len(body) != count:
                body = local_socket.split(body[0], count)
            return encoding.decode(body, KINDS[code])
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            self._refuse(f"{type(error).__name__}: {error}")
            return None

    def _refuse(self, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._refused_logged >= REFUSED_LOG_S:
            self._refused_logged = now
            logger.warning("refused a message: %s (%d so far)", why, self.refused)


class Order:
    """Puts messages of senders that use both ways in the order of their numbers."""

    def __init__(self) -> None:
        self._expected: dict[bytes, int] = {}
        self._held: dict[bytes, dict[int, tuple[Any, bool]]] = {}
        """Early messages, kept until the messages before them came by the other way."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of any sender is kept."""
        return not self._expected and not self._held

    def put(self, sender: bytes, number: int, message: Any, *, is_last: bool) -> list[Any]:
        """The messages that are now due: none, or `message` and those that waited for it."""
        expected = self._expected.get(sender, 1)
        if number != expected:
            self._held.setdefault(sender, {})[number] = (message, is_last)
            return []
        due = [message]
        held = self._held.pop(sender, None)
        while held and not is_last and (next_one := held.pop(expected + len(due), None)):
            message, is_last = next_one
            due.append(message)
        if held:
            self._held[sender] = held
        if is_last:
            self._expected.pop(sender, None)
        else:
            self._expected[sender] = expected + len(due)
        return due


class Waiter:
    """Waits for the first message at any of several inboxes."""

    def __init__(self, *inboxes: Inbox) -> None:
        self._inboxes = inboxes
        self._poll = select.poll()
        for inbox in inboxes:
            for fd in inbox.fds:
                self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float | None) -> list[Inbox]:
        """The inboxes that have a message, as soon as one does; none if `timeout_s` passes first.

        A timeout may end up to a millisecond early, never late: steps are timed by it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ready = [inbox for inbox in self._inboxes if inbox.has_message()]
        while not ready:
            # The system waits for whole milliseconds; Python would round up.
            left_ms = None if deadline is None else int((deadline - time.monotonic()) * 1000)
            if left_ms is not None and left_ms <= 0:
                return []
            readable = [fd for fd, _ in self._poll.poll(left_ms)]
            ready = [inbox for inbox in self._inboxes if inbox.has_message_at(readable)]
        return ready


class Outbox:
    """Sends messages to one inbox. Not thread-safe.

    A message goes by ZeroMQ if it is too large for a datagram or if the receiver has fallen behind.
    Messages are numbered, to keep their order over both ways.
    """

    def __init__(self, address: str, context: zmq.Context[Any] | None = None) -> None:
        self.address = address
        endpoint, self._secret, key = Address.parse(address)
        self._socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.curve_serverkey = key
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        if "[" in endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(endpoint)
        self._local = local_socket.connect(self._secret)
        self.sender = secrets.token_bytes(8)
        """Its name in its messages' heads."""
        self._number = 0

    @property
    def is_local(self) -> bool:
        """Whether it sends datagrams, too: the receiver is on this node."""
        return self._local is not None

    def send(self, message: Any) -> None:
        """Queue a message. Raises `EngineDeadError` if the receiver stopped reading long ago, and
        `ValueError` for one of more than `MAX_BYTES`."""
        self.send_frames(type(message), encoding.encode(message))

    def send_frames(self, kind: type[Any], frames: list[bytes | memoryview]) -> None:
        """As `send`, for frames that are encoded already (one step to many workers)."""
        self._send(_CODES[kind], frames)

    def close(self, linger_s: float = 1.0) -> None:
        """Close the sockets after sending what is queued, within `linger_s`."""
        if self._local is not None:
            with contextlib.suppress(EngineDeadError):  # then nobody needs the last message
                self._send(_BYE, [b""])
            self._local.close()
        self._socket.close(int(linger_s * 1000))

    def _send(self, code: int, frames: list[bytes | memoryview]) -> None:
        number = 0 if self._local is None else self._number + 1
        head = HEAD.pack(self._secret, code, self.sender, number, len(frames))
        if self._local is None or not local_socket.send(self._local, head, frames):
            if max(memoryview(frame).nbytes for frame in frames) > MAX_BYTES:
                raise ValueError(f"a message of more than {MAX_BYTES} bytes")
            try:
                self._socket.send_multipart([head, *frames], zmq.NOBLOCK, copy=True)
            except zmq.Again as error:
                raise EngineDeadError(
                    f"{self.address.partition('#')[0]} has {SEND_LIMIT} messages unread"
                ) from error
        self._number = number
