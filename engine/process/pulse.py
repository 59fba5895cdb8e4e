"""`Pulse`: for how long a peer has been silent, as far as this process can tell."""

from __future__ import annotations

MAX_TICK_S = 0.5
"""Between two looks, at most this many seconds count as silence. An observer that slept longer was
itself stopped or starved, and the rest of that time says nothing about the peer."""


class Pulse:
    """Silence of one peer, in seconds during which the observer was awake."""

    def __init__(self, now: float) -> None:
        self.silent_s = 0.0
        self._looked = now

    def beat(self) -> None:
        """Note that the peer was heard."""
        self.silent_s = 0.0

    def tick(self, now: float) -> float:
        """Look again at time `now`, at least every `MAX_TICK_S`. Returns the silence in seconds."""
        self.silent_s += min(now - self._looked, MAX_TICK_S)
        self._looked = now
        return self.silent_s
