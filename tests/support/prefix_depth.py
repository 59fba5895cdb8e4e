"""How much of a prompt a match says that one replica holds."""

from __future__ import annotations

from deploy.routing import PrefixMatch


def depth_of(match: PrefixMatch, slot: int) -> int:
    """Leading pages that the replica in this slot holds."""
    held = [end for level, end in enumerate(match.ends) if match.holders(level) >> slot & 1]
    return max(held, default=0)
