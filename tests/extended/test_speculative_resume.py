"""Streams of an engine that drafts go on at one that doesn't."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from tests.support.drafters import OUTPUTS
from tests.support.http_server import manta
from tests.support.processes import actor_pids, launch_mark
from tests.support.speculative_streams import outputs_without_drafts, stream_all


def test_streams_go_on_at_a_replica_that_does_not_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two engines one drafts. Its worker dies, and its streams go on at the other."""
    expected = outputs_without_drafts()
    first = tmp_path / "first"
    monkeypatch.setenv(OUTPUTS, str(first))
    config = {"method": "tests.support.drafters:OnlyTheFirst", "draft_length": "fixed"}
    sizes = {"max_total_tokens": 16384, "num_replicas": 2}
    with manta(dtype="float32", speculative_config=config, **sizes) as running:
        url = f"{running.base_url}/v1"
        worker = int(first.read_text())
        assert len(actor_pids(launch_mark(running.pid), "WorkerActor")) == 2
        assert asyncio.run(stream_all(url)) == expected

        async def many() -> list[dict[str, list[tuple[str, list[int]]]]]:
            return await asyncio.gather(stream_all(url), stream_all(url), stream_all(url, worker))

        assert asyncio.run(many()) == [expected] * 3
        metrics = httpx.get(f"{running.base_url}/metrics", timeout=30).text
        resumed = re.findall(r"^manta_requests_resumed_total{[^}]*} (\S+)", metrics, re.M)
        assert sum(map(float, resumed)) > 0
