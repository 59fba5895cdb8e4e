"""The shortest queue, in tokens."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from deploy.routing.policy import RoutingPolicy
from deploy.routing.route_request import RouteRequest


class LeastTokensPolicy(RoutingPolicy):
    """The replica with the fewest uncached prompt tokens queued; ties: the fewest in flight.

    The strongest policy that doesn't look where a prompt is cached. It knows the caches only
    to count what it has sent: a queue of cached prompts is short.
    """

    uses_index = True

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        queued = self._open_to(self.loads.queued, exclude)
        inflight = np.where(queued == queued.min(), self.loads.inflight, np.inf)
        return self.slots.name(self.loads.least(inflight))
