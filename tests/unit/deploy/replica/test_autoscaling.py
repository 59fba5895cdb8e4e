"""EngineLoadPolicy: the scarcest thing decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deploy.replica.autoscaling import EngineLoadPolicy, autoscaling_stats
from deploy.start.config import AppConfig
from engine.scheduler.stats import SchedulerStats

POLICY = EngineLoadPolicy(32, 0.8, 8192)


def wanted(requests: float, kv: dict[str, float], queued: dict[str, float], **more: Any) -> float:
    context = SimpleNamespace(
        total_num_requests=requests,
        aggregated_metrics={"kv_use": kv, "queued_tokens": queued},
        running_replicas=more.get("running", ["a", "b"]),
    )
    replicas, state = POLICY(context)  # type: ignore[arg-type]
    assert state == {}
    return replicas


@pytest.mark.parametrize(
    ("requests", "kv", "queued", "expected"),
    [
        (0, {}, {}, 0),
        (96, {}, {}, 3),
        (10, {"a": 0.8, "b": 0.8}, {"a": 0, "b": 0}, 2),
        (10, {"a": 1.0, "b": 1.0}, {"a": 0, "b": 0}, 2.5),
        (10, {"a": 0.4, "b": 0.4}, {"a": 8192, "b": 16384}, 3),
        (64, {"a": 0.1, "b": 0.1}, {"a": 8192, "b": 0}, 2),
    ],
)
def test_the_scarcest_decides(
    requests: float, kv: dict[str, float], queued: dict[str, float], expected: float
) -> None:
    assert wanted(requests, kv, queued) == pytest.approx(expected)


def test_replicas_that_have_gone_count_no_more() -> None:
    assert wanted(0, {"a": 0.8, "gone": 0.8}, {"gone": 99999}) == pytest.approx(1)


def test_no_reports_yet() -> None:
    context = SimpleNamespace(total_num_requests=32, aggregated_metrics=None, running_replicas=[])
    assert POLICY(context)[0] == 1  # type: ignore[arg-type]


def test_stats() -> None:
    stats = SchedulerStats(kv_used_tokens=300, kv_cached_tokens=600, kv_total_tokens=1000)
    stats.waiting_tokens = 70
    found = autoscaling_stats(stats)
    assert (found["kv_use"], found["queued_tokens"]) == (0.3, 70)


def test_flex_requests_may_be_ignored() -> None:
    stats = SchedulerStats(
        num_flex_running=40,
        num_flex_waiting=24,
        waiting_tokens=90_000,
        flex_waiting_tokens=81_808,
        kv_used_tokens=900,
        kv_flex_tokens=500,
        kv_total_tokens=1000,
    )
    reports = {name: {"a": value} for name, value in autoscaling_stats(stats).items()}

    def wanted(total_num_requests: int, policy: EngineLoadPolicy) -> float:
        context = SimpleNamespace(
            total_num_requests=total_num_requests,
            aggregated_metrics=reports,
            running_replicas=["a"],
        )
        return policy(context)[0]  # type: ignore[arg-type]

    args = {"model": "m", "autoscaling": {"ignore_flex": True, "target_kv_use": 0.8}}
    config = AppConfig.from_args({**args, "model": "models/manta-small"})
    made = config.replica_scaling()["autoscaling_config"]
    assert "ignore_flex" not in made
    ignoring = EngineLoadPolicy(**made["policy"]["policy_kwargs"])
    assert wanted(96, ignoring) == pytest.approx(1)  # 32 requests, 8192 tokens, 0.4 / 0.8
    assert wanted(10, ignoring) == pytest.approx(1), "an older number of requests"
    assert wanted(96, POLICY) == pytest.approx(90_000 / 8192)


def test_configured() -> None:
    args = {
        "model": "models/manta-small",
        "autoscaling": {"max_replicas": 4, "target_kv_use": 0.5, "target_queued_tokens": 100},
    }
    config = AppConfig.from_args(args).replica_scaling()["autoscaling_config"]
    assert config["max_replicas"] == 4
    policy = config["policy"]
    made = policy["policy_function"](**policy["policy_kwargs"])
    context = SimpleNamespace(
        total_num_requests=0,
        aggregated_metrics={"kv_use": {"a": 0.5}, "queued_tokens": {"a": 300}},
        running_replicas=["a"],
    )
    assert made(context)[0] == pytest.approx(3)
