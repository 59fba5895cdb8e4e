"""`Abort`: what ends sequences before their time, on somebody's request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class Abort:
    """One prompt's, for all its copies. `ids`: what it can be aborted by; `owner`: the name of the
    API key that it came with."""

    ids: frozenset[str] = frozenset()
    owner: str = ""
    is_set: bool = False
    scopes: set[asyncio.Timeout] = field(default_factory=set)
    """Work that is under way; an abort lets its time run out."""

    def set(self) -> None:
        """End the sequences, wherever they are. To be called in their event loop."""
        if not self.is_set:
            self.is_set = True
            for scope in self.scopes:
                scope.reschedule(asyncio.get_running_loop().time())
