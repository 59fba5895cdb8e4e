"""Calls of random sets of tools validate."""

from __future__ import annotations

import pytest

from tests.support.http_server import manta
from tests.support.random_tools import check_random_tools


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.full_chaos)])
def test_calls_of_random_tools_validate(count: int) -> None:
    with manta(max_total_tokens=32768, dtype="float32") as running:
        check_random_tools(f"{running.base_url}/v1", count)
