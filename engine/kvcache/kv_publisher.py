"""`KVPublisher`: tells routers what the prefix cache holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.kvcache import RadixCache
from engine.protocol.messages import KVEvents, KVSnapshot, SubscribeKVEvents

logger = logging.getLogger(__name__)

PERIOD_S = 0.01
"""While steps run, events are gathered for this long and sent together."""
HEARTBEAT_S = 1.0
"""Subscribers hear of this engine at least this often, also without events."""


class KVPublisher:
    """Sends a snapshot to each new subscriber, then numbered events to all.

    `send(address, message)` returns whether the receiver still reads. `reply_to` identifies a
    subscriber. A subscriber that missed events subscribes again.
    """

    def __init__(self, tree: RadixCache, send: Callable[[str, Any], bool]) -> None:
        self._tree = tree
        self._send = send
        self._replicas: dict[str, str] = {}
        """Subscribers, and the name that each uses for this engine."""
        self._due = 0.0
        self._seq = 0
        self.epoch = time.time_ns()

    def __len__(self) -> int:
        """Number of subscribers."""
        return len(self._replicas)

    def subscribe(self, request: SubscribeKVEvents) -> None:
        """Answer with a snapshot. Ignored if the cache has no events."""
        if not self._tree.has_events:
            return
        if self._tree.has_pending_events:
            self._flush()
        seq, stored = self._tree.snapshot()
        hashes = [page for event in stored for page in event.block_hashes]
        snapshot = KVSnapshot(request.replica, self.epoch, seq, np.array(hashes, np.uint64))
        if self._send(request.reply_to, snapshot):
            self._replicas[request.reply_to] = request.replica

    def unsubscribe(self, reply_to: str) -> None:
        """Send nothing more to `reply_to`. Unknown subscribers are ignored."""
        self._replicas.pop(reply_to, None)

    def publish(self, now: float, *, is_idle: bool) -> None:
        """Send the events so far, if `PERIOD_S` has passed or the loop is about to sleep. Without
        events, send after `HEARTBEAT_S`."""
        pending = self._tree.has_pending_events
        if (pending and (is_idle or now >= self._due)) or now >= self._due + HEARTBEAT_S:
            self._due = now + PERIOD_S
            self._flush()

    def _flush(self) -> None:
        events = self._tree.drain_events()
        if events:
            self._seq = events[-1].seq
        for reply_to, replica in list(self._replicas.items()):
            if not self._send(reply_to, KVEvents(replica, self.epoch, self._seq, events)):
                logger.warning("a subscriber of cache events doesn't read; dropping it")
                del self._replicas[reply_to]
