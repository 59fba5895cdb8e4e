"""A worker is killed while streams of a model that transformers' code computes run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.test_chaos import PATIENT_S, cluster, resumed, under_load
from tests.support.chaos_load import Load
from tests.support.families import FAMILIES, make_family


def kill_a_worker(folder: Path) -> None:
    async def work(load: Load) -> None:
        await running.strike("worker", "kill", PATIENT_S)
        await asyncio.sleep(1.0)

    with cluster(2, model=str(folder)) as running:
        load = asyncio.run(under_load(running, 4, work, output=120))
        assert running.is_complete(), running.counts()
        print(f"\n{len(load.finished)} streams, resumed: {dict(resumed(running.url))}")
        assert sum(resumed(running.url).values()) > 0


@pytest.mark.timeout(600)
def test_a_mixture_of_experts(tmp_path: Path) -> None:
    kill_a_worker(make_family(tmp_path, "qwen3_moe"))


@pytest.mark.full_chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family(tmp_path: Path, name: str) -> None:
    kill_a_worker(make_family(tmp_path, name))
