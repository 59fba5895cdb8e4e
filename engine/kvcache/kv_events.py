"""`KVEventLog`: what a prefix cache tells the outside about the pages it holds."""

from __future__ import annotations

from collections import deque

from engine.protocol.messages import AllCleared, BlockRemoved, BlockStored, KVEvent


class KVEventLog:
    """Events since the last drain, numbered 1, 2, 3, ... without gaps.

    A log that nobody drains keeps the last `max_pending` events. Its reader later sees a gap in the
    numbers and asks for a snapshot.
    """

    def __init__(self, max_pending: int = 100_000) -> None:
        self.seq = 0
        self._pending: deque[KVEvent] = deque(maxlen=max_pending)

    def stored(self, block_hashes: list[int], parent_hash: int, namespace: str) -> None:
        """Note pages that entered the tree, as in `BlockStored`."""
        self._pending.append(BlockStored(self._next(), block_hashes, parent_hash, namespace))

    def removed(self, block_hashes: list[int]) -> None:
        """Note pages that left the tree."""
        self._pending.append(BlockRemoved(self._next(), block_hashes))

    def cleared(self) -> None:
        """Note that the tree is empty."""
        self._pending.append(AllCleared(self._next()))

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to drain."""
        return bool(self._pending)

    def drain(self) -> list[KVEvent]:
        """The pending events in order; the log forgets them."""
        events = list(self._pending)
        self._pending.clear()
        return events

    def _next(self) -> int:
        self.seq += 1
        return self.seq
