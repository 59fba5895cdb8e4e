"""What a worker's process makes of its configuration."""

from __future__ import annotations

from pathlib import Path

from engine.worker.worker_role import _join
from tests.support.models import make_config, make_model


def test_a_worker_learns_which_groups_divide_experts(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path, "LlamaForCausalLM"), ep_size=1)
    assert _join(config, 0, ("", 0), "127.0.0.1").ep_size == 1
