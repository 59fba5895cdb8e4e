"""A Ray cluster of several nodes on this machine: which rank of an engine lies where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.placement_group import remove_placement_group as remove

from deploy.start.config import AppConfig
from engine.actors.cluster_gpus import gpu_shortage, node_gpus, placement_strategy
from engine.actors.engine_group import EngineGroup
from engine.actors.rank_order import bundle_order
from engine.config import EngineConfig
from engine.errors import ConfigError


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Nodes A and B with 3 GPUs each, C with 2: GPUs that only Ray believes in."""
    head: dict[str, Any] = {"num_cpus": 4, "num_gpus": 2, "resources": {"C": 10}}
    nodes = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    for name, gpus in (("A", 3), ("B", 3)):
        nodes.add_node(num_cpus=4, num_gpus=gpus, resources={name: 10})
    ray.init(address=nodes.address, logging_level="warning", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def place(bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
    group = placement_group(bundles, strategy=strategy)
    ray.get(group.ready(), timeout=30)
    return group


def node_of(group: PlacementGroup) -> dict[int, str]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes


def bundles_of(**args: Any) -> list[dict[str, float]]:
    """As the application asks for them."""
    config = AppConfig.from_args({"device": "cuda", "max_model_len": 64, **args})
    return config.placement_bundles(use_gpu=True)


def test_cluster_is_seen_without_a_gpu(cluster: None) -> None:
    assert node_gpus() == [3, 3, 2]
    assert gpu_shortage(2, 4, node_gpus()) == ""
    assert "has 8 (3 + 3 + 2 on its nodes)" in gpu_shortage(4, 4, node_gpus())


@pytest.mark.parametrize(("tp_size", "pp_size", "whole"), [(2, 1, 1), (2, 3, 3), (2, 4, 3)])
def test_groups_stay_inside_nodes(cluster: None, tp_size: int, pp_size: int, whole: int) -> None:
    """3 + 3 + 2 GPUs hold three whole pairs; only the fourth has to span nodes."""
    strategy = placement_strategy(tp_size, pp_size, node_gpus())
    assert strategy == ("STRICT_PACK" if pp_size == 1 else "PACK")
    group = place(bundles_of(tp_size=tp_size, pp_size=pp_size), strategy)
    try:
        nodes = node_of(group)
        order = bundle_order(group, tp_size * pp_size, tp_size)
        pairs = [{nodes[b] for b in order[i : i + 2]} for i in range(0, len(order), 2)]
        free = [sum(n == node for b, n in nodes.items() if b) for node in set(nodes.values())]
        must = sum(count // tp_size for count in free)
        assert sum(len(pair) == 1 for pair in pairs) == must
        assert must >= whole - 1, "Ray spread the bundles more than it had to"
        if strategy == "STRICT_PACK":
            assert len(set(nodes.values())) == 1
    finally:
        remove(group)


def test_engine_runs_its_ranks_in_that_order(cluster: None) -> None:
    """Bundles lie B A B A, the owner is on A: ranks 0 and 1 run on A, 2 and 3 on B."""
    bundles = [{"A": 1.0}] + [{name: 1.0} for name in "BABA"]
    group = place(bundles, "PACK")
    config = EngineConfig(device="simulated", tp_size=2, pp_size=2, max_model_len=64)
    engine = EngineGroup(config, group, 1)

    async def run() -> list[str]:
        await engine.start()
        nodes = [engine._processes[f"worker {rank}"].node_id for rank in range(4)]
        await engine.stop()
        return nodes

    try:
        nodes = asyncio.run(run())
    finally:
        engine.kill()
        remove(group)
    placed = node_of(group)
    assert nodes == [placed[0], placed[0], placed[1], placed[1]]
    assert placed[0] != placed[1]
    assert engine.num_kv_tokens == 256 * 64


def test_engine_without_a_placement_group_says_what_is_missing(cluster: None) -> None:
    config = EngineConfig(device="cuda", tp_size=8, pp_size=2, max_model_len=64)
    with pytest.raises(ConfigError, match=r"needs 16 GPUs.*has 8 \(3 \+ 3 \+ 2"):
        asyncio.run(EngineGroup(config, None, 1).start())
