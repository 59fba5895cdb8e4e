"""`IngressListener`: what the parts of an ingress tell each other."""

from __future__ import annotations

from typing import Protocol

from engine.protocol.messages import Pong


class IngressListener(Protocol):
    """Told in the ingress' event loop; replicas and tokenizers go by their inboxes' addresses."""

    def replica_alive(self, pong: Pong) -> None:
        """An engine replica has answered. Called at each answer."""

    def replica_lost(self, replica: str) -> None:
        """An engine replica hangs or is gone, and is forgotten."""

    def tokenizer_lost(self, address: str) -> None:
        """The tokenizer is dead; what it knew is gone. Another one is being started."""
