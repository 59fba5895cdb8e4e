"""What a router knows of one replica's cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.protocol.messages import KVEvent


@dataclass(slots=True, eq=False)
class ReplicaContents:
    """Page hashes of one replica. A page is in `held` or in `booked`, never in both."""

    bit: int
    """1 << slot of the replica."""
    epoch: int | None = None
    """The life of its scheduler that the event numbers belong to. None until the first events or
    the first snapshot."""
    seq: int = 0
    """Number of the last event applied."""
    held: set[int] = field(default_factory=set)
    """Pages that the replica's events say it has."""
    booked: dict[int, int] = field(default_factory=dict)
    """Pages that requests sent there will leave, with the number of the latest booking of each."""
    waiting: deque[KVEvent] | None = None
    """Events that came after a gap, in order. None when there is no gap."""
