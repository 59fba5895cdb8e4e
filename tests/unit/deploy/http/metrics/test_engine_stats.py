"""Statistics of schedulers as families of samples."""

from __future__ import annotations

import msgspec

from deploy.http.metrics.engine_stats import EngineStats
from engine.scheduler.stats import SchedulerStats, imbalance


def test_experts_have_a_sample_for_each_layer() -> None:
    tokens = {1: [6, 2], 4: [0, 0]}
    stats = SchedulerStats(
        expert_tokens_total=tokens,
        expert_imbalance={layer: imbalance(counts) for layer, counts in tokens.items()},
    )
    asked = {"replica": "a", **msgspec.structs.asdict(stats)}
    families = {family.name: family for family in EngineStats([asked]).families('m="x"')}
    found = families["manta_engine_expert_tokens_total"]
    assert found.kind == "counter"
    assert found.samples.splitlines() == [
        'manta_engine_expert_tokens_total{layer="1",expert="0",replica="a",m="x"} 6.0',
        'manta_engine_expert_tokens_total{layer="1",expert="1",replica="a",m="x"} 2.0',
        'manta_engine_expert_tokens_total{layer="4",expert="0",replica="a",m="x"} 0.0',
        'manta_engine_expert_tokens_total{layer="4",expert="1",replica="a",m="x"} 0.0',
    ]
    found = families["manta_engine_expert_imbalance"]
    assert found.kind == "gauge"
    assert found.samples.splitlines() == [
        'manta_engine_expert_imbalance{layer="1",replica="a",m="x"} 1.5',
        'manta_engine_expert_imbalance{layer="4",replica="a",m="x"} 1.0',
    ]


def test_without_counts_there_is_no_family_of_experts() -> None:
    asked = {"replica": "a", **msgspec.structs.asdict(SchedulerStats())}
    names = [family.name for family in EngineStats([asked]).families("")]
    assert "manta_engine_num_running" in names and not any("expert" in name for name in names)
