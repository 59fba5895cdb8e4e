"""A client that leaves has its request ended, behind HAProxy. Others: `tests/extended`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.servers import ManagedServer
from tests.support.leaving_servers import CHECKS, behind, running


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[ManagedServer]:
    with running(request.param) as server:
        yield server


@behind("haproxy")
@pytest.mark.parametrize("check", CHECKS)
def test_clients_that_leave(server: ManagedServer, check: Callable[[ManagedServer], None]) -> None:
    check(server)
