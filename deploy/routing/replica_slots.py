"""A small number for each replica: its bit in a set, its place in an array of loads."""

from __future__ import annotations


class ReplicaSlots:
    """Gives replicas slots 0, 1, 2, ... A new replica gets the lowest free slot."""

    def __init__(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._name_of: list[str | None] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, replica: str) -> bool:
        return replica in self._slot_of

    @property
    def capacity(self) -> int:
        """The most slots that were in use at once; each slot is below it."""
        return len(self._name_of)

    @property
    def names(self) -> list[str]:
        """Replicas, in the order in which they were added."""
        return list(self._slot_of)

    def add(self, replica: str) -> int:
        """The replica's slot; it gets one if it has none."""
        slot = self._slot_of.get(replica)
        if slot is None:
            if len(self._slot_of) < len(self._name_of):
                slot = self._name_of.index(None)
                self._name_of[slot] = replica
            else:
                slot = len(self._name_of)
                self._name_of.append(replica)
            self._slot_of[replica] = slot
        return slot

    def remove(self, replica: str) -> int:
        """Free the replica's slot and return it. Raises KeyError if the replica is unknown."""
        slot = self._slot_of.pop(replica)
        self._name_of[slot] = None
        return slot

    def slot(self, replica: str) -> int:
        """Raises KeyError if the replica is unknown."""
        return self._slot_of[replica]

    def get(self, replica: str) -> int | None:
        return self._slot_of.get(replica)

    def name(self, slot: int) -> str:
        """Raises KeyError if the slot is free."""
        name = self._name_of[slot] if 0 <= slot < len(self._name_of) else None
        if name is None:
            raise KeyError(f"slot {slot} holds no replica")
        return name
