"""Ranks on nodes, strategies, and what is said when there are too few GPUs."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import serve_app
from deploy.start.gpu_wait import patience, wait_for_gpus
from deploy.start.processes import MARK
from engine.actors.cluster_gpus import gpu_shortage, placement_strategy
from engine.actors.rank_order import rank_order
from engine.config import EngineConfig
from engine.errors import ConfigError


def groups(nodes: str, owner: str, tp_size: int) -> list[str]:
    """Nodes of each tensor parallel group, in the order of the stages."""
    order = rank_order(list(nodes), owner, tp_size)
    ranks = [nodes[index] for index in order]
    return ["".join(ranks[i : i + tp_size]) for i in range(0, len(ranks), tp_size)]


def test_interleaved_bundles_are_sorted() -> None:
    assert groups("ABAB", "B", 2) == ["BB", "AA"]
    assert groups("ABAB", "A", 2) == ["AA", "BB"]
    assert rank_order(list("ABAB"), "A", 2) == [0, 2, 1, 3]


def test_sorting_alone_would_split_groups() -> None:
    """Cut into fours, AAA BBBB C would give none that is whole."""
    assert groups("AAABBBBC", "A", 4) == ["AAAC", "BBBB"]
    assert groups("AAABBBBC", "C", 4) == ["CAAA", "BBBB"]
    assert groups("ABBBBBAC", "B", 4) == ["BBBB", "BAAC"]


def test_a_node_keeps_its_stages_together() -> None:
    assert groups("ABCABCABCABC", "C", 2) == ["CC", "CC", "AA", "AA", "BB", "BB"]
    assert groups("ABAB", "elsewhere", 1) == ["A", "A", "B", "B"]


@given(
    nodes=st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=24),
    owner=st.sampled_from("ABCDEF"),
    tp_size=st.integers(1, 8),
)
def test_no_more_groups_span_nodes_than_must(nodes: list[str], owner: str, tp_size: int) -> None:
    nodes = nodes[: len(nodes) // tp_size * tp_size]
    order = rank_order(nodes, owner, tp_size)
    assert sorted(order) == list(range(len(nodes)))
    cut = [order[i : i + tp_size] for i in range(0, len(order), tp_size)]
    places = [[nodes[index] for index in group] for group in cut]
    whole = [group[0] for group in places if len(set(group)) == 1]
    assert len(whole) >= sum(nodes.count(node) // tp_size for node in set(nodes))
    if owner in nodes:
        assert nodes[order[0]] == owner
    # The owner's group may stand before the others' and its whole ones come first.
    changes = sum(a != b for a, b in itertools.pairwise(whole))
    assert not whole or changes <= len(set(whole))


def test_strategy() -> None:
    assert placement_strategy(8, 1, [8, 8]) == "STRICT_PACK"
    assert placement_strategy(8, 1, [4, 4]) == "PACK"
    assert placement_strategy(4, 2, [8, 8]) == "PACK"
    assert placement_strategy(1, 1, [1]) == "STRICT_PACK"
    assert placement_strategy(1, 1, []) == "PACK"


def test_shortage_says_what_is_asked_for_and_what_there_is() -> None:
    assert gpu_shortage(2, 2, [2, 2]) == ""
    text = gpu_shortage(4, 2, [4, 2])
    for words in ("tp_size 4 x pp_size 2 needs 8 GPUs", "has 6 (4 + 2 on its nodes)"):
        assert words in text
    assert "needs 1 GPU, one" in gpu_shortage(1, 1, []) and "has none" in gpu_shortage(1, 1, [])


class Cluster:
    """Gets its GPUs at `at` seconds."""

    def __init__(self, at: float) -> None:
        self.now, self.at = 0.0, at

    def nodes(self) -> list[int]:
        return [8] if self.now >= self.at else [2]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, wait_s: float | None) -> list[int]:
        engine = EngineConfig(tp_size=4)
        return wait_for_gpus(engine, wait_s, self.nodes, clock=lambda: self.now, sleep=self.sleep)


def test_a_cluster_gets_time_to_grow(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deploy.start.gpu_wait"):
        cluster = Cluster(at=65)
        assert cluster.wait(600) == [8] and cluster.now == 65
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and all("needs 4 GPUs" in text for text in texts)
    cluster = Cluster(at=1e9)
    with pytest.raises(ConfigError, match=r"needs 4 GPUs.*has 2 \(2 on.*gpu_wait_s \(now 10\)"):
        cluster.wait(10)
    assert cluster.now == 10
    assert Cluster(at=1e9).wait(None) == [2]


def test_a_cluster_of_its_own_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    assert patience(30.0) == 30.0 and patience(None) is None
    monkeypatch.setenv(MARK, "x")
    assert patience(30.0) == 0.0 and patience(None) == 0.0


@pytest.mark.parametrize(
    ("nodes", "strategy", "asked"), [([8, 8], "STRICT_PACK", {}), ([2, 2], "PACK", {"pp_size": 2})]
)
def test_application_asks_ray_for_a_gpu_each(
    nodes: list[int], strategy: str, asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve_app, "http_host", lambda: None)
    monkeypatch.setattr(serve_app, "node_gpus", lambda: nodes)
    for device in ("cuda", "auto"):
        app = serve_app.build_app({"device": device, "tp_size": 2, **asked})
        engines = app._bound_deployment.init_args[0][0]._bound_deployment
        config = engines._replica_config
        workers = 2 * asked.get("pp_size", 1)
        assert config.placement_group_strategy == strategy
        assert config.placement_group_bundles[1:] == [{"GPU": 1.0, "CPU": 1.0}] * workers
        assert engines.init_args[0].device == "cuda"


def test_application_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve_app, "http_host", lambda: None)
    monkeypatch.setattr(serve_app, "node_gpus", lambda: [1])
    app = serve_app.build_app({"device": "auto", "tp_size": 2})
    assert app._bound_deployment.init_args[0][0]._bound_deployment.init_args[0].device == "cpu"
    with pytest.raises(ConfigError, match="needs 2 GPUs"):
        serve_app.build_app({"device": "cuda", "tp_size": 2, "gpu_wait_s": 0})
