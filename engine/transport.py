"""ZeroMQ between the roles: one `Inbox` per role, an `Outbox` to each inbox it talks to.

An inbox binds one explicit address on a random port; its `address` also holds a secret, which
every message carries: whoever doesn't know it is ignored. Addresses are handed out through Ray
(or a parent process), never guessed.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

import msgspec
import zmq

from engine import messages
from engine.errors import EngineDeadError
from engine.tokenizer import tokenizer_messages

logger = logging.getLogger(__name__)

SEND_LIMIT = 10_000
"""Messages queued for a receiver that doesn't read; beyond it the receiver counts as dead."""

_KINDS: tuple[type[Any], ...] = (
    messages.AddRequest,
    messages.AbortRequest,
    messages.ModelWorkerBatch,
    messages.SampleMasks,
    messages.GenerationBatchResult,
    messages.StepOutputs,
    messages.Shutdown,
    messages.WorkerReady,
    messages.ClientGone,
    messages.RequestsDone,
    messages.RequestTaken,
    messages.Ping,
    messages.Pong,
    messages.SubscribeKVEvents,
    messages.UnsubscribeKVEvents,
    messages.KVSnapshot,
    messages.KVEvents,
    tokenizer_messages.EncodeRequest,
    tokenizer_messages.EncodeReply,
    tokenizer_messages.DecodeRequest,
    tokenizer_messages.DecodeReply,
    tokenizer_messages.ChatRequest,
    tokenizer_messages.Register,
    tokenizer_messages.Registered,
    tokenizer_messages.Unregister,
    tokenizer_messages.TextOutputs,
)
_CODES = {kind: bytes([i]) for i, kind in enumerate(_KINDS)}


class Inbox:
    """Receives messages of any kind from any number of senders, in order per sender."""

    def __init__(self, host: str = "127.0.0.1", context: zmq.Context[Any] | None = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self._secret = secrets.token_bytes(16)
        self.address = f"tcp://{host}:{port}#{self._secret.hex()}"
        self.refused = 0
        """Messages dropped for a wrong secret or shape."""

    def recv(self, timeout_s: float | None = 0.0) -> Any | None:
        """The next message; None if none came in time (None = wait for ever)."""
        while True:
            if not self.socket.poll(None if timeout_s is None else int(timeout_s * 1000)):
                return None
            message = self.parse(self.socket.recv_multipart(copy=False))
            if message is not None:
                return message

    def parse(self, frames: list[zmq.Frame]) -> Any | None:
        """A message from raw frames; None (counted) if it isn't one of ours."""
        head = frames[0].bytes
        if len(frames) < 2 or not secrets.compare_digest(head[:-1], self._secret):
            self._refuse("wrong secret")
            return None
        if head[-1] >= len(_KINDS):
            self._refuse("unknown kind")
            return None
        try:
            return messages.decode([f.buffer for f in frames[1:]], _KINDS[head[-1]])
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            self._refuse(f"{type(error).__name__}: {error}")
            return None

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self.socket.close(0)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        logger.warning("refused a message: %s (%d so far)", why, self.refused)


class Outbox:
    """Sends messages to one inbox. Not thread-safe."""

    def __init__(self, address: str, context: zmq.Context[Any] | None = None) -> None:
        self.address = address
        endpoint, _, secret = address.partition("#")
        self._secret = bytes.fromhex(secret)
        self.socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self.socket.setsockopt(zmq.LINGER, 1000)
        if "[" in endpoint:
            self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.connect(endpoint)

    def send(self, message: Any) -> None:
        """Queue a message. Raises `EngineDeadError` if the receiver stopped reading long ago."""
        self.send_frames(type(message), messages.encode(message))

    def send_frames(self, kind: type[Any], frames: list[bytes | memoryview]) -> None:
        """As `send`, of frames already encoded (one plan to many workers)."""
        head = self._secret + _CODES[kind]
        try:
            self.socket.send_multipart([head, *frames], zmq.NOBLOCK, copy=True)
        except zmq.Again as error:
            raise EngineDeadError(
                f"{self.address.partition('#')[0]} has {SEND_LIMIT} messages unread"
            ) from error

    def close(self) -> None:
        """Close the socket after sending what is queued (at most a second)."""
        self.socket.close()
