"""A client that leaves has its request ended.

With `make chaos` in every way, behind the Python proxy, too, as in a pod, and with a model that
really computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.servers import ManagedServer
from tests.support.leaving_servers import CHECKS, SERVERS, behind, check_every_way, running


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[ManagedServer]:
    with running(request.param) as server:
        yield server


@behind(
    "haproxy", *(pytest.param(name, marks=pytest.mark.full_chaos) for name in ("pod", "python"))
)
@pytest.mark.parametrize("check", CHECKS)
def test_clients_that_leave(server: ManagedServer, check: Callable[[ManagedServer], None]) -> None:
    check(server)


@pytest.mark.full_chaos
@pytest.mark.timeout(3600)
@behind(*SERVERS)
def test_every_way_ten_times(server: ManagedServer) -> None:
    check_every_way(server)
