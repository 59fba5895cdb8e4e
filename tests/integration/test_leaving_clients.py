"""A client that leaves has its request ended, behind HAProxy. Others: `tests/extended`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.servers import ManagedServer
from tests.support.leaving_servers import (
    SERVERS,
    behind,
    check_covering,
    check_early_cancels,
    check_headers,
    long_model,
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[ManagedServer]:
    with long_model() as model, SERVERS[request.param](model) as running:
        yield running


@behind("haproxy")
def test_a_request_ends_with_its_client(server: ManagedServer) -> None:
    check_covering(server)


@behind("haproxy")
def test_cancels_that_meet_the_answers_of_the_tokenizer_lose_no_request(
    server: ManagedServer,
) -> None:
    check_early_cancels(server)


@behind("haproxy")
def test_headers_that_serve_cannot_read(server: ManagedServer) -> None:
    check_headers(server)
