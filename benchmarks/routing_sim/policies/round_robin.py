"""Every replica in turn."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from deploy.routing.policy import RoutingPolicy
from deploy.routing.route_request import RouteRequest


class RoundRobinPolicy(RoutingPolicy):
    """The replica that was used longest ago."""

    def choose(self, request: RouteRequest, exclude: Collection[str] = ()) -> str:
        closed = np.isinf(self._open_to(self.loads.inflight, exclude))
        never = np.iinfo(np.int64).max
        return self.slots.name(int(np.where(closed, never, self.loads.last_used).argmin()))
