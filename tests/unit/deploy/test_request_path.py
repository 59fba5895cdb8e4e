"""How many files a reader opens between an HTTP request and the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.request_path import files_of_a_request
from tests.support.tiny_tokenizers import write_byte_level

CARRIERS = {
    "engine/protocol/transport.py",
    "engine/protocol/local_socket.py",
    "engine/protocol/encoding.py",
    "engine/protocol/async_inbox.py",
    "engine/protocol/sampling_params.py",
}
"""Of the ground layer: how any message travels, and the parameters that travel in it."""
DECISION = ("deploy/routing/", "engine/kvcache/page_hash.py")
"""Behind one call, `RoutingPolicy.choose`: which replica has most of the prompt cached."""
MODEL = "deploy/http/served_models.py"
"""Behind one call, `ServedModels.of`: which of the models a request names."""
PERIODIC = {"deploy/replica/ingress_links.py", "engine/process/pulse.py"}
"""A clock runs them, not the request: they are among the files if it takes long."""
MAX_FILES = 14


@pytest.mark.parametrize("routing_policy", ["prefix_aware", ""])
def test_way_of_a_token_id_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routing_policy: str
) -> None:
    """From `Endpoint.handle` to `Scheduler.add`; "" leaves the choice of a replica to Serve."""
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 4}
    model = str(write_byte_level(tmp_path))
    found = files_of_a_request(model, body, routing_policy, monkeypatch)
    found.remove(MODEL)
    found -= PERIODIC
    decision = {path for path in found if path.startswith(DECISION)}
    way = sorted(found - CARRIERS - decision)
    print(f"{len(found)} files, of them {len(way)} on the way:", *way, sep="\n")
    assert "engine/scheduler/scheduler.py" in way and "deploy/http/generation/endpoint.py" in way
    assert len(way) <= MAX_FILES, way
    assert bool(decision) == bool(routing_policy)
    if not routing_policy:
        assert len(found) <= 18, sorted(found)
