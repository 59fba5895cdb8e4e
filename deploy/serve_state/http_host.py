"""`http_host`: where Serve listens."""

from __future__ import annotations

import ray
from ray.serve.context import _get_global_client


def http_host() -> str | None:
    """The host of the running Serve's HTTP options; None if Serve doesn't run yet."""
    if not ray.is_initialized():
        return None
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else str(client.http_config.host)
