"""`IngressListener`: what the parts of an ingress tell each other."""

from __future__ import annotations

from typing import Protocol

from engine.protocol.messages import Pong


class IngressListener(Protocol):
    """Its methods are called in the ingress' event loop. Addresses of inboxes name replicas and
    tokenizers."""

    def replica_alive(self, pong: Pong) -> None:
        """An engine replica has answered; called for each answer."""

    def replica_lost(self, replica: str) -> None:
        """An engine replica hangs or is gone; the watch has forgotten it."""

    def tokenizer_lost(self, address: str) -> None:
        """The tokenizer is dead; what it knew is gone. Another one is being started."""
