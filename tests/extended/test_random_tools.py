"""Calls of 300 random sets of tools validate."""

from __future__ import annotations

from tests.support.http_server import manta
from tests.support.random_tools import check_random_tools


def test_calls_of_random_tools_validate() -> None:
    with manta(max_total_tokens=32768, dtype="float32") as running:
        check_random_tools(f"{running.base_url}/v1", 300)
