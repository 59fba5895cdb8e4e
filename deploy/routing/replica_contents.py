"""What a router knows of one replica's cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.protocol.messages import KVEvent


@dataclass(slots=True, eq=False)
class ReplicaContents:
    """Page hashes of one replica. A page is in `held` or in `booked`, never in both.

    Fields:
        bit: 1 << slot of the replica.
        epoch: the life of its scheduler that the event numbers belong to. None until the first
            events or the first snapshot.
        seq: number of the last event applied.
        held: pages that the replica's events say it has.
        booked: pages that requests sent there will leave, with the number of the latest booking
            of each.
        waiting: events that came after a gap, in order. None when there is no gap.
    """

    bit: int
    epoch: int | None = None
    seq: int = 0
    held: set[int] = field(default_factory=set)
    booked: dict[int, int] = field(default_factory=dict)
    waiting: deque[KVEvent] | None = None
