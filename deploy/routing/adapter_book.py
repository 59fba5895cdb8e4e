"""`AdapterBook`: a router's own account of the adapters that each replica has at hand."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LOAD_TOKENS = 8000.0
"""What it costs to read an adapter, in tokens of prefill."""
EVICT_TOKENS = 8000.0
"""What it costs besides where another adapter has to leave memory for it."""
SLOT_TOKENS = 2048.0
"""What it costs to wait for a slot where as many adapters run as can."""


@dataclass(slots=True)
class _Replica:
    held: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Adapters in its memory, the one used last behind the others."""
    running: Counter[str] = field(default_factory=Counter)
    """Unfinished requests by adapter."""


class AdapterBook:
    """Counted at dispatch, as `LoadBook` counts: what a replica is sent, it reads."""

    def __init__(self, max_running: int = 4, max_held: int = 16) -> None:
        """Of each replica: adapters that run at once, and that are in its memory."""
        self.max_running, self.max_held = max_running, max_held
        self._replicas: dict[int, _Replica] = {}
        self._of_request: dict[str, tuple[int, str]] = {}

    def add(self, slot: int) -> None:
        """A replica has this slot now, and no adapter yet."""
        self._replicas[slot] = _Replica()

    def remove(self, slot: int) -> None:
        """The replica is gone."""
        del self._replicas[slot]
        self._of_request = {key: at for key, at in self._of_request.items() if at[0] != slot}

    def dispatched(self, request_id: str, slot: int, adapter: str) -> None:
        """A request with this adapter was sent; "" is none."""
        self.finished(request_id)
        if not adapter:
            return
        self._of_request[request_id] = slot, adapter
        replica = self._replicas[slot]
        replica.running[adapter] += 1
        replica.held[adapter] = None
        replica.held.move_to_end(adapter)
        if len(replica.held) > self.max_held:
            idle = (name for name in replica.held if not replica.running[name])
            del replica.held[next(idle, next(iter(replica.held)))]

    def finished(self, request_id: str) -> None:
        """It ended, or was sent elsewhere. Unknown requests are ignored."""
        slot, adapter = self._of_request.pop(request_id, (None, ""))
        if slot is not None:
            running = self._replicas[slot].running
            running[adapter] -= 1
            if not running[adapter]:
                del running[adapter]

    def cost(self, adapter: str, capacity: int) -> NDArray[np.float64]:
        """[capacity]: what a request with this adapter costs besides at the replica of each slot,
        in tokens."""
        found = np.zeros(capacity)
        for slot, replica in self._replicas.items():
            if adapter in replica.running:
                continue
            if len(replica.running) >= self.max_running:
                found[slot] += SLOT_TOKENS
            if adapter not in replica.held:
                found[slot] += LOAD_TOKENS
                if len(replica.held) >= self.max_held:
                    found[slot] += EVICT_TOKENS
        return found
