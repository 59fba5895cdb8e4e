"""`EngineLoadPolicy`: how many engine replicas Serve should run."""

# No `from __future__ import annotations`: Ray Serve may inspect the annotations.
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

KV_USE = "kv_use"
QUEUED_TOKENS = "queued_tokens"
FLEX_REQUESTS = "flex_requests"
FLEX = "flex_"
"""Begins the names of flex requests' parts of the first two."""


def autoscaling_stats(stats: Any) -> dict[str, float]:
    """What an engine replica reports to Serve, from its `SchedulerStats`."""
    total = max(stats.kv_total_tokens, 1)
    return {
        KV_USE: stats.kv_used_tokens / total,
        QUEUED_TOKENS: float(stats.waiting_tokens),
        FLEX_REQUESTS: float(stats.num_flex_running + stats.num_flex_waiting),
        FLEX + KV_USE: stats.kv_flex_tokens / total,
        FLEX + QUEUED_TOKENS: float(stats.flex_waiting_tokens),
    }


class EngineLoadPolicy:
    """Computes replicas by requests, by KV cache and by the queue; the largest number counts.

    Requests alone say little of an engine's load: ten may hold the same KV as a thousand others.
    `target_ongoing_requests` and `target_queued_tokens` are per replica. `target_kv_use` is the
    share of a replica's KV cache that running requests should hold. With `ignore_flex`, flex
    requests count nowhere. Serve adds delays and bounds.
    """

    def __init__(
        self,
        target_ongoing_requests: float,
        target_kv_use: float,
        target_queued_tokens: float,
        ignore_flex: bool = False,
    ) -> None:
        self._targets = {KV_USE: target_kv_use, QUEUED_TOKENS: target_queued_tokens}
        self._target_ongoing_requests = target_ongoing_requests
        self._ignore_flex = ignore_flex

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Number of replicas wanted (Serve rounds up), and an empty state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        running = set(context.running_replicas)

        def total(name: str) -> float:
            # Serve may remember a replica that is gone for a while.
            return sum(v for replica, v in metrics.get(name, {}).items() if replica in running)

        requests = float(context.total_num_requests)
        used = {name: total(name) for name in self._targets}
        if self._ignore_flex:
            requests -= total(FLEX_REQUESTS)
            used = {name: value - total(FLEX + name) for name, value in used.items()}
        wanted = [used[name] / target for name, target in self._targets.items()]
        # The reports are of different times.
        return max(requests / self._target_ongoing_requests, *wanted, 0.0), {}
