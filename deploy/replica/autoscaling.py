"""`EngineLoadPolicy`: how many engine replicas Serve should run."""

# No `from __future__ import annotations`: Ray Serve may inspect the annotations.
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

KV_USE = "kv_use"
QUEUED_TOKENS = "queued_tokens"


def autoscaling_stats(stats: Any) -> dict[str, float]:
    """What an engine replica reports to Serve, from its `SchedulerStats`."""
    return {
        KV_USE: stats.kv_used_tokens / max(stats.kv_total_tokens, 1),
        QUEUED_TOKENS: float(stats.waiting_tokens),
    }


class EngineLoadPolicy:
    """Computes replicas by requests, by KV cache and by the queue; the largest number counts.

    Requests alone say little of an engine's load: ten may hold the same KV as a thousand others.
    `target_ongoing_requests` and `target_queued_tokens` are per replica. `target_kv_use` is the
    share of a replica's KV cache that running requests should hold. Serve adds delays and bounds.
    """

    def __init__(
        self,
        target_ongoing_requests: float,
        target_kv_use: float,
        target_queued_tokens: float,
    ) -> None:
        self._targets = {KV_USE: target_kv_use, QUEUED_TOKENS: target_queued_tokens}
        self._target_ongoing_requests = target_ongoing_requests

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Number of replicas wanted (Serve rounds up), and an empty state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        wanted = [context.total_num_requests / self._target_ongoing_requests]
        running = set(context.running_replicas)
        for name, target in self._targets.items():
            # Serve may remember a replica that is gone for a while.
            values = [v for replica, v in metrics.get(name, {}).items() if replica in running]
            wanted.append(sum(values) / target)
        return max(wanted), {}
