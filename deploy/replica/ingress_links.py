"""`IngressLinks`: the ingresses that an engine replica answers, while they live."""

from __future__ import annotations

import logging
from typing import Any

from engine.process.pulse import Pulse
from engine.protocol.outboxes import Outboxes

logger = logging.getLogger(__name__)


class IngressLinks:
    """Connections by inbox address. An ingress pings its replicas; one that no longer does counts
    as dead. Ray doesn't cancel the calls of a caller that died (2.60, measured)."""

    def __init__(self) -> None:
        self._outboxes = Outboxes()
        self._pulses: dict[str, Pulse] = {}

    def heard(self, ingress: str, now: float) -> None:
        """Note that the ingress lives."""
        pulse = self._pulses.get(ingress)
        if pulse is None:
            self._pulses[ingress] = Pulse(now)
        else:
            pulse.beat()

    def send(self, ingress: str, message: Any) -> None:
        """Send to an ingress that was heard before."""
        if not self._outboxes.send(ingress, message):
            logger.warning("ingress %s doesn't read its messages", ingress.partition("#")[0])

    def drop_silent(self, now: float, limit_s: float) -> list[str]:
        """Forget the ingresses that have been silent for `limit_s`; returns their addresses."""
        silent = [i for i, pulse in self._pulses.items() if pulse.tick(now) >= limit_s]
        for ingress in silent:
            del self._pulses[ingress]
            self._outboxes.drop(ingress)
        return silent

    def close(self) -> None:
        self._outboxes.close()
