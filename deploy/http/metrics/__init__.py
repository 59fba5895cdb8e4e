"""Prometheus metrics of the server; `docs/metrics.md` describes each."""

from deploy.http.metrics.request_tracker import RequestTracker, Work
from deploy.http.metrics.server_metrics import ServerMetrics

__all__ = ["RequestTracker", "ServerMetrics", "Work"]
