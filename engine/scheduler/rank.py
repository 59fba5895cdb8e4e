"""`Rank`: the requests of one rank, interactive or flex."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduler.key_shares import KeyShares
from engine.scheduler.new_token_ratio import NewTokenRatio
from engine.scheduler.req import Req


@dataclass(slots=True, eq=False)
class Rank:
    """What the requests of a rank have for themselves.

    Flex requests run in what interactive ones leave. Each rank has its own queue, limits and
    estimates, so that no flex request delays an interactive one, or has it refused.
    """

    is_flex: bool
    ratio: NewTokenRatio
    num_reqs: int = 0
    """Requests in any state."""
    shares: KeyShares = field(default_factory=KeyShares)
    """Those that wait, by API key."""
    chunked: Req | None = None
    """The one request whose prompt is partly launched, shared by all micro-batches."""
    held_up: Req | None = None
    """A waiting prompt, longer than a step, that another key's prompt in chunks held up."""
    full_until: int = 0
    """Number of the first step that looks at waiting requests again: before it, no room for them is
    expected. A release sets it to 0."""
