"""`/v1/embeddings` and `/v1/score` over a fake engine: bodies, replies, errors, ends."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import httpx
import numpy as np
import pytest

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from engine.errors import EngineDeadError, RequestError
from engine.protocol.tokenizer_messages import TextDelta
from tests.support.api_calls import call, error_of, post
from tests.support.fake_client import BOS, HIDDEN, FakeEngineClient, expected_embedding
from tests.support.metrics_text import bare

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"


def embed(client: FakeEngineClient | None = None, **body: Any) -> dict[str, Any]:
    reply = post(EMBEDDINGS, client, **{"input": "abc"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def score(client: FakeEngineClient | None = None, **body: Any) -> dict[str, Any]:
    reply = post(SCORE, client, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def vectors(body: dict[str, Any]) -> np.ndarray:
    """[prompts, dimensions]"""
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert all(item["object"] == "embedding" for item in body["data"])
    return np.array([item["embedding"] for item in body["data"]])


def unit(ids: list[int], dimensions: int = HIDDEN) -> np.ndarray:
    vector = expected_embedding(ids)[:dimensions].astype(np.float64)
    return vector / np.linalg.norm(vector)  # type: ignore[no-any-return]


def test_reply_has_openais_shape() -> None:
    client = FakeEngineClient()
    client.num_cached = 2
    body = embed(client)
    assert body.pop("id").startswith("embd-")
    assert abs(body.pop("created") - time.time()) < 60
    (item,) = body.pop("data")
    assert item.pop("embedding") == pytest.approx(unit([BOS, *b"abc"]).tolist())
    assert item == {"object": "embedding", "index": 0}
    assert body == {
        "object": "list",
        "model": "fake",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 0,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[BOS, *b"ab"]]),
        (["ab", "c"], [[BOS, *b"ab"], [BOS, *b"c"]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_all_forms_of_input(given: Any, prompts: list[list[int]]) -> None:
    client = FakeEngineClient()
    body = embed(client, input=given)
    assert [request.prompt_ids for request in client.started] == prompts
    assert all(request.pooling == "last" for request in client.started)
    assert np.allclose(vectors(body), [unit(ids) for ids in prompts])
    assert body["usage"]["total_tokens"] == sum(map(len, prompts))


def test_base64_has_the_same_numbers() -> None:
    numbers = vectors(embed(input=["abc", "d"]))
    items = embed(input=["abc", "d"], encoding_format="base64")["data"]
    found = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in items]
    assert np.array_equal(np.stack(found), numbers)


def test_dimensions_and_normalize() -> None:
    ids = [BOS, *b"abc"]
    assert vectors(embed(dimensions=3))[0] == pytest.approx(unit(ids, 3))
    raw = expected_embedding(ids)
    assert vectors(embed(normalize=False))[0].tolist() == raw.tolist()
    assert vectors(embed(normalize=False, dimensions=2))[0].tolist() == raw[:2].tolist()


def test_fields_reach_the_engine() -> None:
    client = FakeEngineClient()
    fields = {"priority": -3, "cache_salt": "s", "add_special_tokens": False, "user": "u"}
    body = embed(client, input=["a", "b"], request_id="mine", model="fake", **fields)
    assert body["id"] == "embd-mine"
    assert [r.request_id for r in client.started] == ["embd-mine-0", "embd-mine-1"]
    assert {(r.priority, r.namespace) for r in client.started} == {(-3, "s")}
    assert client.started[0].prompt_ids == [*b"a"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [*b"de"]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [BOS, *b"a"]),
        ({"truncate_prompt_tokens": 256}, [BOS, *b"abcde"]),
        ({"truncate_prompt_tokens": -1}, [BOS, *b"abcde"]),
    ],
)
def test_prompts_are_truncated(fields: dict[str, Any], kept: list[int]) -> None:
    client = FakeEngineClient()
    assert embed(client, input="abcde", **fields)["usage"]["prompt_tokens"] == len(kept)
    assert client.started[0].prompt_ids == kept


def test_a_prompt_may_take_the_whole_context() -> None:
    client = FakeEngineClient(max_model_len=16)
    embed(client, input=[5] * 16)
    embed(client, input="a" * 100, truncate_prompt_tokens=-1)
    assert [len(request.prompt_ids) for request in client.started] == [16, 16]
    reply = post(EMBEDDINGS, client, input=[5] * 17)
    error = error_of(reply)
    assert (reply.status_code, error["param"]) == (400, "input")
    assert error["code"] == "context_length_exceeded"
    assert "17 tokens" in error["message"] and "completion" not in error["message"]


def test_values_that_switch_an_unsupported_field_off_pass() -> None:
    embed(embed_dtype="float32", endianness="little", use_activation=True, messages=None)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": [[5], []]}, 400, "input"),
        ({"input": ["a", 5]}, 400, "input"),
        ({"input": ["a", [5]]}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": [1.5]}, 400, "input"),
        ({"input": [True]}, 400, "input"),
        ({"input": [300]}, 400, "input"),
        ({"input": [-1]}, 400, "input"),
        ({"input": [2**70]}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": "a" * 70_000}, 400, "input"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN + 1}, 400, "dimensions"),
        ({"input": "a", "dimensions": 2.5}, 400, "dimensions"),
        ({"input": "a", "dimensions": 2**70}, 400, "dimensions"),
        ({"input": "a", "normalize": "yes"}, 400, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 257}, 400, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "top"}, 400, "truncation_side"),
        ({"input": "a", "priority": 2**40}, 400, "priority"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
        ({"input": "a", "embed_dtype": "float16"}, 400, "embed_dtype"),
        ({"input": "a", "stream": True}, 400, "stream"),
        ({"input": "a", "frobnicate": 1}, 400, "frobnicate"),
    ],
)
def test_bad_input_is_named(body: dict[str, Any], status: int, param: str) -> None:
    client = FakeEngineClient()
    reply = post(EMBEDDINGS, client, **body)
    assert (reply.status_code, error_of(reply)["param"]) == (status, param)
    assert not client.started


def test_not_too_many_inputs() -> None:
    assert len(embed(input=["a"] * 2048)["data"]) == 2048


def test_score_reply_has_vllms_shape() -> None:
    client = FakeEngineClient()
    body = score(client, text_1="ab", text_2=["ab", "cde"])
    assert body.pop("id").startswith("score-")
    assert abs(body.pop("created") - time.time()) < 60
    assert body == {
        "object": "list",
        "model": "fake",
        "data": [
            {"index": 0, "object": "score", "score": pytest.approx(1.0)},
            {
                "index": 1,
                "object": "score",
                "score": pytest.approx(unit([BOS, *b"ab"]) @ unit([BOS, *b"cde"])),
            },
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 0,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert len(client.started) == 3
    assert all(item["score"] <= 1 for item in score(text_1="ab", text_2=["ab"] * 50)["data"])


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", ["ab"]),
        (["a"], "b", ["ab"]),
        ("a", ["b", "c", "d"], ["ab", "ac", "ad"]),
        (["a", "b"], ["c", "d"], ["ac", "bd"]),
    ],
)
def test_what_is_compared(
    names: tuple[str, str], first: Any, second: Any, pairs: list[str]
) -> None:
    data = score(**dict(zip(names, (first, second), strict=True)))["data"]
    wanted = [unit([BOS, *a.encode()]) @ unit([BOS, *b.encode()]) for a, b in pairs]
    assert [item["score"] for item in data] == pytest.approx(wanted)
    assert call(
        FakeEngineClient(), "POST", "/score", json={"text_1": "a", "text_2": "b"}
    ).is_success


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "text_1"),
        ({"text_1": "a"}, 400, "text_2"),
        ({"text_2": "a"}, 400, "text_1"),
        ({"queries": "a"}, 400, "documents"),
        ({"documents": "a"}, 400, "queries"),
        ({"text_1": "a", "documents": "b"}, 400, "queries"),
        ({"text_1": "a", "queries": "a", "documents": "b"}, 400, "text_1"),
        ({"text_1": "", "text_2": "b"}, 400, "text_1"),
        ({"text_1": "a", "text_2": []}, 400, "text_2"),
        ({"text_1": "a", "text_2": [5]}, 400, "text_2"),
        ({"text_1": ["a", "b"], "text_2": "c"}, 400, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, 400, "text_1"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, 400, "text_2"),
        ({"text_1": "a" * 300, "text_2": "b"}, 400, "text_1"),
        ({"queries": "a", "documents": ["b", "c" * 300]}, 400, "documents"),
        ({"text_1": "a", "text_2": "b", "model": "other"}, 404, "model"),
        ({"text_1": "a", "text_2": "b", "dimensions": 4}, 400, "dimensions"),
        ({"text_1": "a", "text_2": "b", "messages": []}, 400, "messages"),
    ],
)
def test_bad_scores_are_named(body: dict[str, Any], status: int, param: str) -> None:
    client = FakeEngineClient()
    reply = post(SCORE, client, **body)
    assert (reply.status_code, error_of(reply)["param"]) == (status, param)
    assert not client.started


REQUESTS = [
    (EMBEDDINGS, {"input": ["a", "b", "c"]}),
    (SCORE, {"text_1": "a", "text_2": ["b", "c"]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("as_delta", [False, True])
def test_errors_of_the_engine(path: str, body: dict[str, Any], as_delta: bool) -> None:
    for error, status in ((RequestError("full", status=429), 429), (EngineDeadError("x"), 503)):
        client = FakeEngineClient()
        client.error_at, client.error_delta = (0, error), as_delta
        reply = post(path, client, **body)
        assert reply.status_code == (500 if as_delta else status)
        assert error_of(reply)["message"] and client.open == 0


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_all_texts_run_at_once_and_end_with_their_client(path: str, body: dict[str, Any]) -> None:
    client = FakeEngineClient()
    client.hang_at = 0

    async def run() -> None:
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))
        async with httpx.AsyncClient(transport=transport, base_url="http://manta") as http:
            asking = asyncio.ensure_future(http.post(path, json=body))
            while len(client.started) < 3:
                await asyncio.sleep(0)
            assert client.open == 3
            metrics = bare((await http.get("/metrics")).text)
            name = path.rpartition("/")[2]
            assert f'manta_requests_in_flight{{endpoint="{name}"}} 1.0' in metrics
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert client.open == 0 and len(client.aborted) == 3
            metrics = bare((await http.get("/metrics")).text)
            assert f'manta_requests_in_flight{{endpoint="{name}"}} 0.0' in metrics
            assert f'manta_requests_total{{endpoint="{name}",status="499"}} 1.0' in metrics

    asyncio.run(run())


def test_only_prompt_tokens_are_counted() -> None:
    client = FakeEngineClient()
    client.num_cached = 1

    async def run() -> str:
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))
        async with httpx.AsyncClient(transport=transport, base_url="http://manta") as http:
            assert (await http.post(EMBEDDINGS, json={"input": ["ab", "c"]})).is_success
            return (await http.get("/metrics")).text

    metrics = bare(asyncio.run(run())).splitlines()
    for line in (
        "manta_prompt_tokens_total 5.0",
        "manta_cached_prompt_tokens_total 2.0",
        "manta_generation_tokens_total 0.0",
        'manta_requests_total{endpoint="embeddings",status="200"} 1.0',
        'manta_sequences_total{endpoint="embeddings",finish_reason="stop"} 2.0',
        'manta_time_to_first_token_seconds_count{endpoint="embeddings"} 0.0',
        'manta_e2e_request_latency_seconds_count{endpoint="embeddings"} 1.0',
    ):
        assert line in metrics, line


def test_an_abort_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no vector to answer with."""
    client = FakeEngineClient()

    async def aborted(request: Any) -> TextDelta:
        return client._delta(request, 0, "", [], "abort")

    monkeypatch.setattr(client, "_embed", aborted)
    error = error_of(post(EMBEDDINGS, client, input="a"))
    assert (error["code"], error["type"]) == ("request_aborted", "invalid_request_error")


def test_the_document_describes_both() -> None:
    document = call(FakeEngineClient(), "GET", "/openapi.json").json()
    for path, body, reply in (
        (EMBEDDINGS, "EmbeddingRequest", "Embeddings"),
        (SCORE, "ScoreRequest", "Scores"),
        ("/score", "ScoreRequest", "Scores"),
    ):
        operation = document["paths"][path]["post"]
        text = json.dumps(operation)
        assert f"#/components/schemas/{body}" in text and f"#/components/schemas/{reply}" in text
        assert set(operation["responses"]) >= {"200", "400", "404", "429", "503"}
    fields = document["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert set(fields) >= {"input", "encoding_format", "dimensions", "normalize", "user"}
