"""Where experts stand: maps made of counts, read, and applied to a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.start.cli import main
from deploy.start.expert_counts_file import read_expert_counts
from engine.checkpoint import model_config
from engine.checkpoint.expert_balance import busiest, in_order, pack_greedily
from engine.checkpoint.expert_map import ExpertMap
from engine.checkpoint.layout import ModelLayout
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.recording import record
from tests.support.models import THROUGH_TRANSFORMERS, make_model


def test_experts_are_packed_by_their_tokens() -> None:
    assert pack_greedily([[9, 8, 1, 2], [0, 0, 0, 0]], 2) == [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    assert pack_greedily([[10, 1, 1, 1]], 2) == [[[0, 3], [1, 2]]], "a group has room for two"
    assert pack_greedily([[5, 6]], 1) == [[[0, 1]]] and pack_greedily([[5, 6]], 2) == [[[1], [0]]]


def test_busiest_groups_and_the_mean() -> None:
    counts = [[6, 2, 0, 0], [1, 1, 1, 1]]
    assert in_order(counts, 2) == [[[0, 1], [2, 3]]] * 2
    assert busiest(counts, in_order(counts, 2)) == (8 + 2) / (4 + 2)
    assert busiest(counts, [[[0, 2], [1, 3]]] * 2) == (6 + 2) / (4 + 2)
    assert busiest([[0, 0]], [[[0], [1]]]) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_a_map_has_each_expert_once_and_lowers_the_busiest_groups(seed: int) -> None:
    """Counts as skewed as routers' are: few experts with most tokens, neighbours alike."""
    numbers = random.Random(seed)
    counts = {
        layer: sorted(int(1000 / (1 + i) ** 0.7) + numbers.randrange(9) for i in range(64))
        for layer in (1, 4)
    }
    made = ExpertMap.made_of(counts, 8)
    tokens = list(counts.values())
    for groups in made.layers.values():
        assert [len(group) for group in groups] == [8] * 8
        assert sorted(expert for group in groups for expert in group) == list(range(64))
    assert busiest(tokens, in_order(tokens, 8)) > 3
    assert busiest(tokens, list(made.layers.values())) < 1.4
    with pytest.raises(ConfigError, match="3 groups don't divide the 64 experts of layer 1"):
        ExpertMap.made_of(counts, 3)


def other_balancer(counts: Any, num_groups: int) -> list[list[list[int]]]:
    """The last experts in the first group."""
    return [layer[::-1] for layer in in_order(counts, num_groups)]


def test_another_algorithm_can_make_the_map() -> None:
    assert ExpertMap.made_of({3: [1, 2, 3, 4]}, 2, other_balancer).layers == {3: [[2, 3], [0, 1]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, keys = THROUGH_TRANSFORMERS["deepseek_v3"]
    return make_model(tmp_path_factory.mktemp("model"), arch, **keys)


@pytest.fixture(scope="module")
def layout(folder: Path) -> ModelLayout:
    return record(folder)


def test_a_layers_experts_stand_as_the_map_says(layout: ModelLayout) -> None:
    """The first of three layers is dense; the last isn't in the map."""
    placed = ExpertMap({1: [[3, 0], [2, 1]]}).place(layout, 2)
    first, second = placed.mixtures
    assert [first.experts(group, 2) for group in (0, 1)] == [[0, 3], [1, 2]]
    assert [second.experts(group, 2) for group in (0, 1)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({0: [[0, 1], [2, 3]]}, "names layer 0, which has no mixture in DeepseekV3ForCausalLM"),
        ({1: [[0], [1], [2], [3]]}, "has 4 groups in layer 1, and ep_size makes 2"),
        ({1: [[0, 1], [2, 2]]}, "must name each of the 4 experts of layer 1 once"),
        ({1: [[0, 1, 2], [3]]}, "as many in each group"),
        ({1: [[0, 1], [2, 4]]}, "must name each of the 4 experts"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(
    layout: ModelLayout, layers: dict[int, list[list[int]]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ExpertMap(layers).place(layout, 2)


def test_the_configuration_takes_a_map(
    folder: Path, tmp_path: Path, layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "read_layout", lambda folder: layout)
    file = tmp_path / "map.json"
    file.write_text('{"layers": {"2": [[3, 0], [2, 1]]}}')
    keys: dict[str, Any] = {"model": str(folder), "expert_map": str(file)}
    found = EngineConfig(tp_size=4, ep_size=2, **keys).resolve().model.layout
    assert found is not None and found.mixtures[1].experts(0, 2) == [0, 3]
    for split in ({}, {"tp_size": 2, "ep_size": 1}):
        with pytest.raises(ConfigError, match="every worker has a part of all"):
            EngineConfig(**keys, **split).resolve()
    with pytest.raises(ConfigError, match="has 2 groups in layer 2, and ep_size makes 4"):
        EngineConfig(tp_size=4, **keys).resolve()
    for text in ("{", '{"layer": {}}', '{"layers": {"2": [["a"]]}}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"map\.json can't be read"):
            EngineConfig(tp_size=2, **keys).resolve()


METRICS = """\
# TYPE manta_engine_expert_tokens_total counter
manta_engine_expert_tokens_total{layer="1",expert="0",replica="a",model_name="m"} 4.0
manta_engine_expert_tokens_total{layer="1",expert="1",replica="a",model_name="m"} 1e+06
manta_engine_expert_tokens_total{layer="2",expert="1",replica="a",model_name="m"} 3.0
manta_engine_expert_tokens_total{layer="1",expert="0",replica="b",model_name="m"} 5.0
manta_engine_expert_imbalance{layer="1",replica="a",model_name="m"} 2.0
"""


def test_counts_of_all_replicas_are_added(tmp_path: Path) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(METRICS)
    assert read_expert_counts(str(file)) == {1: [9, 1000000], 2: [0, 3]}
    file.write_bytes(METRICS.replace(" 5.0", " 5.0 1790000000000").replace("\n", "\r\n").encode())
    assert read_expert_counts(str(file)) == {1: [9, 1000000], 2: [0, 3]}
    file.write_text(json.dumps({1: [1, 2], 0: [3, 4]}))
    assert read_expert_counts(str(file)) == {1: [1, 2], 0: [3, 4]}
    for text, words in (
        (METRICS + METRICS.replace('"m"', '"n"'), r"several models \(m, n\)"),
        ("manta_up 1\n", "has no counts of experts"),
        ('{"a": [1]}', "aren't numbers by layer and expert"),
        ('{"1": 3}', "layer 1 has no list"),
        ('{"1": "23"}', "layer 1 has no list"),
        ('{"1": [-2]}', "-2 is negative"),
        ('{"1": [1e999]}', "aren't numbers by layer and expert"),
        (METRICS.replace("5.0", "NaN"), "aren't numbers by layer and expert"),
        (METRICS.replace('expert="0"', 'expert="-3"'), "no expert -3"),
        (METRICS.replace('expert="0"', 'expert="999999999999"'), "no expert 999999999999"),
        (METRICS.replace('expert="0",', ""), "aren't numbers by layer and expert"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_expert_counts(str(file))
    with pytest.raises(ConfigError, match="can't be read"):
        read_expert_counts(str(tmp_path / "none"))


def test_the_command_writes_a_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps({1: [9, 8, 1, 2]}))
    assert main(["expert-map", str(file), "--groups", "2"]) == 0
    out, err = capsys.readouterr()
    assert msgspec.json.decode(out, type=ExpertMap) == ExpertMap({1: [[0, 2], [1, 3]]})
    assert "1.70 times the mean of tokens without the map and 1.00 times with it" in err
    assert main(["expert-map", str(file), "--groups", "3"]) == 2
    assert "3 groups don't divide the 4 experts of layer 1" in capsys.readouterr().err
