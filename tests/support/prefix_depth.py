"""How much of a prompt one replica holds, according to a match."""

from __future__ import annotations

from deploy.routing import PrefixMatch


def depth_of(match: PrefixMatch, slot: int) -> int:
    """Number of leading pages that the replica in this slot holds."""
    held = [end for level, end in enumerate(match.ends) if match.holders(level) >> slot & 1]
    return max(held, default=0)
