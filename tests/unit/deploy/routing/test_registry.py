"""Which class a word of `routing_policy` names, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.policies.round_robin import RoundRobinPolicy
from benchmarks.routing_sim.simulator import SimClock
from deploy.routing import find_policy, make_policy
from deploy.routing.prefix_aware import PrefixAwarePolicy
from deploy.start.config import AppConfig
from engine.errors import ConfigError


def test_a_word_of_its_own_or_a_class_from_elsewhere() -> None:
    assert find_policy("prefix_aware") is PrefixAwarePolicy
    assert find_policy(POLICIES["round_robin"]) is RoundRobinPolicy
    policy = make_policy(POLICIES["round_robin"], SimClock(), seed=3)
    assert isinstance(policy, RoundRobinPolicy) and policy.seed == 3
    config = AppConfig.from_args({"num_replicas": 2, "routing_policy": POLICIES["round_robin"]})
    assert config.routing_policy == POLICIES["round_robin"]
    assert AppConfig.from_args({"num_replicas": 2, "routing_policy": "serve"}).routing_policy == ""


BROKEN = """
from deploy.routing import RoutingPolicy

class Lazy(RoutingPolicy):
    pass

class Other:
    pass

text = "Lazy"
"""


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("nearest", "choose one of prefix_aware. Or `serve` .* or `module:Class`"),
        ("round_robin", "choose one of prefix_aware. Or `serve` .* or `module:Class`"),
        ("", "choose one of prefix_aware"),
        ("broken_policies:", "AttributeError"),
        (":Lazy", "ValueError: Empty module name"),
        ("no.such.module:Lazy", "ModuleNotFoundError: No module named 'no'"),
        ("broken_policies:Missing", "AttributeError: .*Missing"),
        ("broken_policies:Other", "Other is no subclass of deploy.routing.RoutingPolicy"),
        ("broken_policies:text", "text is no subclass of deploy.routing.RoutingPolicy"),
        ("broken_policies:Lazy", "Lazy doesn't define choose"),
        ("failing_policies:Lazy", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(
    word: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policies.py").write_text(BROKEN)
    (tmp_path / "failing_policies.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"^routing_policy '{word}' .*{reason}.*docs/routing.md"):
        AppConfig.from_args({"num_replicas": 2, "routing_policy": word})
    sys.modules.pop("broken_policies", None)
    with pytest.raises(ConfigError, match="prefix_aware"):
        make_policy("nearest", SimClock())
