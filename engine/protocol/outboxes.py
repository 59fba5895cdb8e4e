"""`Outboxes`: a role's connections to the inboxes that it sends to, by address."""

from __future__ import annotations

from typing import Any

from engine.errors import EngineDeadError
from engine.protocol.transport import Outbox


class Outboxes:
    """Connects to an address with the first message to it. Not thread-safe."""

    def __init__(self) -> None:
        self._by_address: dict[str, Outbox] = {}

    def send(self, address: str, message: Any) -> bool:
        """Queue a message; False if the receiver stopped reading long ago. Raises `zmq.ZMQError`
        if a new connection can't be made.

        The connection stays until `drop`: what is queued still arrives if the receiver goes on.
        """
        outbox = self._by_address.get(address)
        if outbox is None:
            outbox = self._by_address[address] = Outbox(address)
        try:
            outbox.send(message)
        except EngineDeadError:
            return False
        return True

    def drop(self, address: str) -> None:
        """Close the connection, if there is one. A later message opens another."""
        outbox = self._by_address.pop(address, None)
        if outbox is not None:
            outbox.close()

    def close(self) -> None:
        for outbox in self._by_address.values():
            outbox.close()
        self._by_address.clear()
