"""Requests made from the OpenAPI document, by schemathesis, against a live server.

Some 300 in CI; thousands with `--full-chaos -m full_chaos` (`make fuzz`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from tests.support.http_server import manta, metric, wait_idle

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TIMEOUT_S = 60.0
SETTINGS = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
    "derandomize": True,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # A short context keeps n = 128 copies affordable.
    with manta(max_model_len=48, max_total_tokens=8192) as server:
        yield server.base_url
        wait_idle(server.base_url, 10.0)
        assert metric(server.base_url, "manta_engine_kv_leaks_total") == 0


@pytest.fixture(scope="module")
def api(url: str) -> OpenApiSchema:
    loaded = schemathesis.openapi.from_url(f"{url}/openapi.json")
    loaded.config.max_stream_events = 100_000  # it leaves a stream after 100 otherwise
    return loaded


GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
)
OPERATIONS = [
    *(("POST", path) for path in GENERATING),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/score"),
    ("POST", "/score"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{record_id}"),
    ("DELETE", "/v1/responses/{record_id}"),
    ("GET", "/v1/responses/{record_id}/input_items"),
    ("POST", "/v1/responses/{record_id}/cancel"),
    ("GET", "/v1/completions/{record_id}"),
    ("DELETE", "/v1/completions/{record_id}"),
    ("GET", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions/{record_id}"),
    ("POST", "/v1/chat/completions/{record_id}"),
    ("DELETE", "/v1/chat/completions/{record_id}"),
    ("GET", "/v1/chat/completions/{record_id}/messages"),
    ("GET", "/v1/messages/{record_id}"),
    ("DELETE", "/v1/messages/{record_id}"),
    ("GET", "/generate/{record_id}"),
    ("DELETE", "/generate/{record_id}"),
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("GET", "/v1/batches"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/abort_request"),
    *(("POST", f"/v1/{verb}_lora_adapter") for verb in ("load", "unload")),
    *(("GET", f"/{name}_info") for name in ("model", "get_model", "server", "get_server")),
    ("GET", "/health_generate"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/debug/status"),
    ("GET", "/debug/trace"),
]


def run(api: OpenApiSchema, method: str, path: str, count: int) -> None:
    """Send `count` requests, valid and invalid ones. Both must be among them."""
    statuses: Counter[int | str] = Counter()
    operation = api[path][method]
    document = api.raw_schema
    cases = operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    def send(case: Case) -> int:
        reply = case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)
        statuses[reply.status_code] += 1
        if reply.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            check_events(reply.content.decode(), document["paths"][path], document["components"])
            statuses["streams"] += 1
        return int(reply.status_code)

    @settings(max_examples=count, **SETTINGS)
    @given(case=cases)
    def check(case: Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # the document can't know its name
        answered = send(case) == 200 and method == "POST"
        if answered and path in GENERATING and not case.body.get("stream"):
            case.body["stream"] = True  # seldom by itself
            assert send(case) == 200

    check()
    print(method, path, dict(statuses))
    if path.endswith("_lora_adapter"):  # this server loads none
        assert min(statuses[403], statuses[400]) >= count // 60, statuses
    elif method == "POST" and ("_id}" in path or path == "/v1/batches"):  # nothing has these ids
        assert statuses[404] > 0 and not statuses[200], statuses
    elif method == "POST" and path != "/flush_cache":  # it has nothing that could be wrong
        assert min(statuses[200], statuses[400]) >= max(1, count // 60), statuses
        assert statuses["streams"] > 0 or path not in GENERATING, statuses


def check_events(body: str, path: dict[str, Any], components: dict[str, Any]) -> None:
    """schemathesis doesn't look into `data`."""
    content = path["post"]["responses"]["200"]["content"]["text/event-stream"]
    *done, schema = content["itemSchema"]["properties"]["data"]["anyOf"]
    shape = jsonschema.Draft202012Validator({**schema["contentSchema"], "components": components})
    *events, end = [event.partition("data: ")[2] for event in body.split("\n\n")]
    assert end == "" and events
    if done:
        assert events.pop() == "[DONE]"
    for event in events:
        shape.validate(json.loads(event))


def test_every_operation_is_here(api: OpenApiSchema) -> None:
    found = {(found.ok().method.upper(), found.ok().path) for found in api.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_some_requests(api: OpenApiSchema, method: str, path: str) -> None:
    run(api, method, path, 10 if method != "POST" else 120 if path in GENERATING else 40)


@pytest.mark.full_chaos
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_thousands_of_requests(api: OpenApiSchema, method: str, path: str) -> None:
    run(api, method, path, 600 if method == "POST" else 50)


def test_the_server_is_well_afterwards(url: str) -> None:
    reply = httpx.post(
        f"{url}/v1/completions", json={"prompt": "def ", "max_tokens": 4}, timeout=30
    )
    assert reply.status_code == 200
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
