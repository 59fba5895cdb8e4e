"""Datagrams between processes of one node: the faster path beside the transport's ZeroMQ.

A datagram wakes only its receiver; ZeroMQ also wakes a thread on either side. On busy cores each
wake-up waits its turn. Abstract Unix sockets leave no file behind, never lose a message, and refuse
one at once when their queue is full. They exist per network namespace: a process that can't connect
counts as being on another node.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import sys
from collections.abc import Sequence

MAX_BYTES = 64 * 1024
"""Limit for the frames of a message. Larger messages gain nothing here."""
BUFFER_BYTES = 2 * MAX_BYTES
"""Enough for any datagram: its head, the sizes of the frames if there are several, the frames."""


def bind(secret: bytes) -> socket.socket | None:
    """A socket for messages to the holder of `secret`; None where there are no such sockets."""
    if sys.platform != "linux":
        return None
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    inbox.bind(_name(secret))
    return inbox


def connect(secret: bytes) -> socket.socket | None:
    """A socket that sends to the one bound with `secret`; None if there is none on this node."""
    if sys.platform != "linux":
        return None
    outbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        outbox.connect(_name(secret))
    except OSError:
        outbox.close()
        return None
    return outbox


def send(outbox: socket.socket, head: bytes, frames: Sequence[bytes | memoryview]) -> bool:
    """Send one message; False if it is too large, the queue is full or the receiver is gone."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sum(sizes) > MAX_BYTES:
        return False
    # Nearly all messages have one frame, which needs no size.
    parts = [head, *frames]
    if len(frames) > 1:
        parts.insert(1, struct.pack(f"<{len(sizes)}I", *sizes))
    try:
        outbox.sendmsg(parts)
    except OSError:
        return False
    return True


def receive(inbox: socket.socket, buffer: memoryview) -> memoryview | None:
    """The next datagram; None if none waits.

    The caller passes a `buffer` of `BUFFER_BYTES`: to make one takes longer than to receive.
    """
    try:
        size = inbox.recv_into(buffer)
    except BlockingIOError:
        return None
    return memoryview(bytes(buffer[:size]))


def split(data: memoryview, count: int) -> list[memoryview]:
    """The `count` (not 1) frames of a datagram without its head; `ValueError` if malformed."""
    try:
        sizes = struct.unpack_from(f"<{count}I", data)
    except struct.error as error:
        raise ValueError("a datagram without its frames' sizes") from error
    start = 4 * count
    if start + sum(sizes) != len(data):
        raise ValueError("a datagram of another size than it says")
    frames = []
    for size in sizes:
        frames.append(data[start : start + size])
        start += size
    return frames


def _name(secret: bytes) -> str:
    # Names are public on the node (/proc/net/unix), the secret isn't.
    return "\0manta-" + hashlib.blake2b(secret, digest_size=16).hexdigest()
