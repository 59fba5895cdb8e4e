"""The GPUs that a Ray cluster has, and whether they are enough for an engine.

Ray is asked, never CUDA: the process that decides needs no GPU itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.actors.ray_types import live_nodes


def node_gpus() -> list[int]:
    """Number of GPUs of each live node that has any, largest first; taken GPUs are included."""
    counts = [int(node["Resources"].get("GPU", 0)) for node in live_nodes()]
    return sorted((count for count in counts if count), reverse=True)


def gpu_shortage(tp_size: int, pp_size: int, nodes: Sequence[int]) -> str:
    """If `nodes` can't hold one engine: the GPUs needed and the GPUs there, in words; else ""."""
    needed = tp_size * pp_size
    if sum(nodes) >= needed:
        return ""
    found = f"{sum(nodes)} ({' + '.join(str(n) for n in nodes)} on its nodes)" if nodes else "none"
    return (
        f"an engine with tp_size {tp_size} x pp_size {pp_size} needs {needed} GPU"
        f"{'s' if needed > 1 else ''}, one for each worker; this Ray cluster has {found}. "
        "Add GPU nodes, lower tp_size or pp_size, or set device: cpu"
    )


def placement_strategy(tp_size: int, pp_size: int, nodes: Sequence[int]) -> str:
    """Ray's strategy for an engine on GPUs. An engine without a pipeline stays on one node if a
    node is large enough; else PACK takes as few nodes as it can."""
    fits_one_node = bool(nodes) and max(nodes) >= tp_size * pp_size
    return "STRICT_PACK" if pp_size == 1 and fits_one_node else "PACK"
