"""Ray calls whose annotations don't fit their use, in one place."""

from __future__ import annotations

from typing import Any

import ray


def actor_class(kind: type[Any], **options: Any) -> Any:
    """`kind` as a Ray actor class that is never restarted alone and reserves no CPU of its own: the
    placement group reserves. `options` are those of `ray.remote`."""
    remote: Any = ray.remote
    return remote(num_cpus=0, max_restarts=0, **options)(kind)


def node_ip() -> str:
    """Address of this node that the engine's other actors can reach."""
    address: Any = ray.util.get_node_ip_address  # type: ignore[attr-defined, unused-ignore]
    return str(address())


def live_nodes() -> list[dict[str, Any]]:
    """What Ray reports of each live node of the cluster."""
    nodes: Any = ray.nodes
    return [node for node in nodes() if node["Alive"]]
