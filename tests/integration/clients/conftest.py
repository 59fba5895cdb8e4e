"""One live server for all client libraries."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.http_server import manta


@pytest.fixture(scope="package")
def url() -> Iterator[str]:
    """The server's address, with `/v1`."""
    with manta(max_total_tokens=32768, dtype="float32") as running:
        yield f"{running.base_url}/v1"


@pytest.fixture(scope="package")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as running:
        yield running
