"""Replies, streams and errors of the HTTP application over a fake engine, in process."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from deploy.http.api import build_api
from deploy.http.openai import replies
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from engine.errors import EngineDeadError, RequestError
from engine.trace import CAPACITY
from tests.support.api_calls import (
    CHAT,
    COMPLETIONS,
    USER,
    call,
    chat,
    complete,
    error_of,
    events,
    joined_lists,
    post,
)
from tests.support.fake_client import BOS, EOS, FakeEngineClient, expected_ids, expected_text
from tests.support.metrics_text import bare, values


def test_completion_reply_has_openais_shape() -> None:
    client = FakeEngineClient()
    client.num_cached = 2
    body = complete(client)
    assert body.pop("id").startswith("cmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "service_tier": None,
        "system_fingerprint": None,
        "kv_transfer_params": None,
        "choices": [
            {
                "index": 0,
                "text": expected_text(5, 4),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "matched_stop": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_chat_reply_has_openais_shape() -> None:
    body = chat()
    assert body.pop("id").startswith("chatcmpl-")
    body.pop("created")
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "service_tier": None,
        "system_fingerprint": None,
        "kv_transfer_params": None,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": expected_text(5, 4),
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                    "reasoning_content": None,
                },
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "matched_stop": None,
                "token_ids": None,
            }
        ],
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 4,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_default_lengths() -> None:
    client = FakeEngineClient(max_model_len=100)
    assert complete(client, max_tokens=None)["usage"]["completion_tokens"] == 16
    assert chat(client, max_tokens=None)["usage"]["total_tokens"] == 100
    assert chat(client, max_tokens=9, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    nearly_full = complete(client, prompt=[65] * 98, max_tokens=None)
    assert nearly_full["usage"]["completion_tokens"] == 2


def test_n_and_prompts_are_numbered_and_seeded() -> None:
    client = FakeEngineClient()
    client.num_cached = 3
    body = complete(client, prompt=["abc", "defg"], n=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [
        expected_text(seed, 4) for seed in (5, 6, 5, 6)
    ]
    assert body["choices"][3]["token_ids"] == expected_ids(6, 4)
    assert body["choices"][3]["prompt_token_ids"] == [BOS, *b"defg"]
    # Prompt tokens count once per prompt.
    assert body["usage"] == {
        "prompt_tokens": 4 + 5,
        "completion_tokens": 16,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert len({request.request_id for request in client.started}) == 4
    assert all(request.return_token_ids for request in client.started)


def test_sequences_without_a_seed_get_different_ones() -> None:
    client = FakeEngineClient()
    complete(client, prompt=["a", "b"], n=3, seed=None)
    seeds = {request.params.seed for request in client.started}
    assert len(seeds) == 6 and None not in seeds


def test_token_ids_and_special_tokens() -> None:
    client = FakeEngineClient()
    complete(client, prompt=[[1, 2], [3]])
    complete(client, prompt="A", add_special_tokens=False, priority=3, cache_salt="s")
    assert [request.prompt_ids for request in client.started] == [[1, 2], [3], [65]]
    assert (client.started[2].priority, client.started[2].namespace) == (3, "s")


def test_stop_string() -> None:
    text = expected_text(5, 8)
    choice = complete(max_tokens=8, stop=text[2:4])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == text[2:4]


def test_completion_logprobs() -> None:
    logprobs = complete(logprobs=2)["choices"][0]["logprobs"]
    text = expected_text(5, 4)
    assert logprobs == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [-0.5] * 4,
        "tokens": list(text),
        "top_logprobs": [{letter: -0.5, "Y": -1.5} for letter in text],
    }
    assert complete(logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [
        {letter: -0.5} for letter in text
    ]


def test_chat_logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(expected_text(5, 4))
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    content = chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", [BOS, *b"abc"]])
def test_echo_with_logprobs(stream: bool, prompt: Any) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream, "seed": 5}
    reply = post(COMPLETIONS, **fields, max_tokens=2)
    chunks = events(reply) if stream else [reply.json()]
    shown = "abc" if prompt == "abc" else "<s>abc"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == shown + expected_text(5, 2)
    joined = {
        key: joined_lists(choice["logprobs"][key] for choice in choices)
        for key in choices[0]["logprobs"]
    }
    begin = len(shown) - 3
    assert joined["tokens"] == ["<s>", *"abc", *expected_text(5, 2)]
    assert joined["token_logprobs"] == [None] + [-0.5] * 5
    assert joined["top_logprobs"] == [None, *({t: -0.5} for t in joined["tokens"][1:])]
    assert joined["text_offset"] == [0, *range(begin, begin + 5)]


def test_offsets_count_the_special_tokens_of_an_echo() -> None:
    fields = {"prompt": [BOS, *b"ab", EOS, *b"c"], "echo": True, "logprobs": 0, "max_tokens": 2}
    (choice,) = post(COMPLETIONS, **fields).json()["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith("<s>ab</s>c")
    places = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(text[offset:].startswith(token) for offset, token in places)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_the_prompt_alone(stream: bool) -> None:
    # What lm-eval-harness sends to score a text.
    client = FakeEngineClient()
    fields = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    reply = post(COMPLETIONS, client, **fields)
    chunks = events(reply) if stream else [reply.json()]
    choice = chunks[0]["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["<s>", *"abc"]
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert client.started[0].params.max_tokens == 1
    assert client.started[0].params.prompt_logprobs == 1


def test_prompt_logprobs_as_vllm() -> None:
    entries = complete(prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1] == {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    body = chat(prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == 8
    assert body["prompt_logprobs"][1]["117"]["rank"] is None


def test_completion_stream() -> None:
    chunks = events(post(COMPLETIONS, prompt="abc", seed=5, max_tokens=3, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(expected_text(5, 3))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_has_role_text_finish_and_usage() -> None:
    options = {"include_usage": True}
    reply = post(CHAT, messages=[USER], seed=5, max_tokens=2, stream=True, stream_options=options)
    chunks = events(reply)
    text = expected_text(5, 2)
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 5
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": text[0]},
        {"content": text[1]},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_continuous_usage(path: str) -> None:
    prompt = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [USER]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = post(path, **prompt, max_tokens=3, stream=True, stream_options=options)
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in events(reply)]
    # A chat begins with the role and ends with the finish_reason in chunks of their own.
    assert counts == ([1, 2, 3, 3] if path == COMPLETIONS else [0, 1, 2, 3, 3, 3])
    options["include_usage"] = False
    reply = post(path, **prompt, max_tokens=3, stream=True, stream_options=options)
    assert all("usage" not in chunk for chunk in events(reply))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_of_copies_hold_the_same_as_the_reply(path: str) -> None:
    prompt = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [USER]}
    fields = {"n": 3, "seed": 9, "max_tokens": 6, "return_token_ids": True, "logprobs": 1}
    if path == CHAT:
        fields |= {"logprobs": True, "top_logprobs": 1}
    client = FakeEngineClient()
    client.swallow_first = 2
    whole = post(path, client, **prompt, **fields).json()
    chunks = events(post(path, client, **prompt, **fields, stream=True))
    for index, choice in enumerate(whole["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        if path == COMPLETIONS:
            assert "".join(c["text"] for c in mine) == choice["text"]
            tokens = joined_lists(c["logprobs"]["tokens"] for c in mine if c["logprobs"])
            assert tokens == choice["logprobs"]["tokens"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert all("prompt_token_ids" not in c for c in mine[1:])
        else:
            content = "".join(c["delta"].get("content", "") for c in mine)
            assert content == choice["message"]["content"]
            entries = joined_lists(c["logprobs"]["content"] for c in mine if c["logprobs"])
            assert entries == choice["logprobs"]["content"]
            assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert joined_lists(c.get("token_ids") or [] for c in mine) == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


def test_chat_template_options_reach_the_client() -> None:
    client = FakeEngineClient()
    chat(client, chat_template_kwargs={"enable_thinking": False})
    conversation = [USER, {"role": "assistant", "content": "I"}]
    chat(client, messages=conversation, continue_final_message=True)
    assert client.chat_calls[0]["template_kwargs"] == {"enable_thinking": False}
    assert client.chat_calls[0]["add_generation_prompt"] is True
    assert client.chat_calls[1]["add_generation_prompt"] is False
    assert client.chat_calls[1]["continue_final_message"] is True
    allowed = ApiSettings(ServerOptions(allow_request_chat_templates=True))
    body = {"messages": [USER], "chat_template": "T", "max_tokens": 1}
    assert call(client, "POST", CHAT, json=body, api_settings=allowed).status_code == 200
    assert client.chat_calls[2]["chat_template"] == "T"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other/model", 404),
    ],
)
def test_other_paths_answer_in_openais_shape(method: str, path: str, status: int) -> None:
    reply = call(FakeEngineClient(), method, path)
    assert reply.status_code == status
    assert error_of(reply)["type"] == "invalid_request_error"


def test_models_version_and_docs() -> None:
    client = FakeEngineClient()
    models = call(client, "GET", "/v1/models").json()
    assert models["object"] == "list"
    assert [(model["id"], model["object"]) for model in models["data"]] == [("fake", "model")]
    assert call(client, "GET", "/v1/models/fake").json() == models["data"][0]
    assert set(call(client, "GET", "/version").json()) == {"version"}
    schema = call(client, "GET", "/openapi.json").json()
    assert "requestBody" in schema["paths"][COMPLETIONS]["post"]


def test_health() -> None:
    client = FakeEngineClient()
    reply = call(client, "GET", "/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    client.is_healthy = False
    reply = call(client, "GET", "/health")
    assert (reply.status_code, reply.json()["detail"]) == (503, "a worker died")


def test_trace() -> None:
    client = FakeEngineClient()
    events = call(client, "GET", "/debug/trace?last=3").json()["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {7, 8, 9}
    for bad in ("0", "9000", "x"):
        reply = call(client, "GET", f"/debug/trace?last={bad}")
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "last"


def test_a_trace_of_megabytes_lets_the_streams_go_on() -> None:
    """Another task of the loop gets a turn for every few dozen steps of the trace."""
    client = FakeEngineClient()
    client.num_traced_steps = CAPACITY
    turns = 0

    async def run() -> int:
        nonlocal turns
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))
        async with httpx.AsyncClient(transport=transport, base_url="http://manta") as http:
            asking = asyncio.ensure_future(http.get(f"/debug/trace?last={CAPACITY}"))
            while not asking.done():
                await asyncio.sleep(0)
                turns += 1
            return len(asking.result().content)

    assert asyncio.run(run()) > 4_000_000
    assert turns > CAPACITY / 64


def test_request_id_is_taken_over() -> None:
    client = FakeEngineClient()
    body = {"prompt": "x", "max_tokens": 1}
    reply = call(client, "POST", COMPLETIONS, json=body, headers={"X-Request-Id": "my-id"})
    assert reply.headers["x-request-id"] == "my-id"
    assert reply.json()["id"] == "cmpl-my-id"
    reply = call(client, "POST", COMPLETIONS, json=body | {"request_id": "mine"})
    assert reply.json()["id"] == "cmpl-mine"
    assert client.started[1].request_id == "cmpl-mine"
    assert call(client, "GET", "/nothing").headers["x-request-id"]
    bare = ApiSettings(add_request_id_header=False)
    reply = call(client, "POST", COMPLETIONS, json=body, api_settings=bare)
    assert "x-request-id" not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("queue full", status=429, code="queue_full"), 429, "queue_full"),
        (RequestError("bad prompt", "prompt"), 400, None),
        (EngineDeadError("secret words"), 503, "engine_unavailable"),
        (KeyError("secret words"), 500, "internal_error"),
    ],
)
def test_errors_before_the_first_token_are_http_errors(
    stream: bool, n: int, error: Exception, status: int, code: str, caplog: Any
) -> None:
    client = FakeEngineClient()
    client.error_at = (0, error)
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
        reply = post(path, client, **prompt, stream=stream, n=n, max_tokens=5)
        assert (reply.status_code, error_of(reply)["code"]) == (status, code)
        assert "secret" not in reply.text
        assert ("retry-after" in reply.headers) == (status in (429, 503))
    if isinstance(error, KeyError):
        assert "secret" not in caplog.text and "KeyError" in caplog.text
    assert client.open == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("as_delta", [False, True])
def test_errors_in_mid_stream_are_events_without_done(n: int, as_delta: bool) -> None:
    client = FakeEngineClient()
    client.error_at = (2, RequestError("it broke", status=500))
    client.error_delta = as_delta
    reply = post(COMPLETIONS, client, prompt="x", stream=True, n=n, max_tokens=5)
    assert "[DONE]" not in reply.text
    chunks = events(reply)
    assert chunks[0]["choices"][0]["text"]
    assert chunks[-1]["error"]["message"] == "it broke"
    assert chunks[-1]["error"]["type"] == "server_error"
    assert client.open == 0
    reply = post(COMPLETIONS, client, prompt="x", n=n, max_tokens=5)
    assert (reply.status_code, error_of(reply)["message"]) == (500, "it broke")
    assert client.open == 0


def test_metrics() -> None:
    client = FakeEngineClient()
    client.num_cached = 3

    async def run() -> str:
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await http.post(COMPLETIONS, json={"prompt": "abc", "n": 2, "max_tokens": 5})
            await http.post(CHAT, json={"messages": [USER], "max_tokens": 4, "stream": True})
            await http.post(CHAT, json={"messages": []})
            return (await http.get("/metrics")).text

    found = values(asyncio.run(run()))
    expected = {
        'manta_requests_total{endpoint="completions",status="200"}': 1,
        'manta_requests_total{endpoint="chat_completions",status="200"}': 1,
        'manta_requests_total{endpoint="chat_completions",status="400"}': 1,
        'manta_sequences_total{endpoint="completions",finish_reason="length"}': 2,
        "manta_prompt_tokens_total": 4 + 4 + 8,
        "manta_cached_prompt_tokens_total": 9,
        "manta_generation_tokens_total": 14,
        'manta_requests_in_flight{endpoint="completions"}': 0,
        'manta_requests_in_flight{endpoint="chat_completions"}': 0,
        'manta_time_to_first_token_seconds_count{endpoint="completions"}': 2,
        'manta_inter_token_latency_seconds_count{endpoint="completions"}': 8,
        'manta_inter_token_latency_seconds_bucket{endpoint="completions",le="+Inf"}': 8,
        'manta_e2e_request_latency_seconds_count{endpoint="chat_completions"}': 1,
        "manta_engine_stats_up": 1,
        'manta_engine_num_running{replica="1"}': 4,
        'manta_engine_retractions_total{replica="0"}': 5,
    }
    assert {key: found[key] for key in expected} == expected


def test_metrics_go_on_without_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.http.metrics.scrape.TIMEOUT_S", 0.01)
    client = FakeEngineClient()
    client.stats_delay_s = 60
    text = bare(call(client, "GET", "/metrics").text)
    assert "manta_engine_stats_up 0.0" in text
    assert "num_running" not in text


def test_the_openapi_document_is_whole() -> None:
    document = call(FakeEngineClient(), "GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for name in set(re.findall(r'"\$ref": "([^"]*)"', text)):
        assert name.removeprefix("#/components/schemas/") in schemas, name
    for path, body in ((COMPLETIONS, "CompletionRequest"), (CHAT, "ChatCompletionRequest")):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{body}"}
        assert {"200", "400", "404", "413", "415", "429", "500", "503"} <= set(
            operation["responses"]
        )
        fields = schemas[body]["properties"]
        assert {"temperature", "stream", "bad_words", "truncate_prompt_tokens"} <= set(fields)
        assert fields["temperature"]["maximum"] == 100


def test_replies_are_as_documented() -> None:
    asked = {"return_token_ids": True, "prompt_logprobs": 2, "n": 2}
    for fields in ({}, asked | {"logprobs": 2}):
        replies.Completion.model_validate(complete(**fields))
    for fields in ({}, asked | {"logprobs": True, "top_logprobs": 2}):
        replies.ChatCompletion.model_validate(chat(**fields))
    client = FakeEngineClient()
    replies.Error.model_validate(post(CHAT, n=0).json())
    replies.Models.model_validate(call(client, "GET", "/v1/models").json())
    replies.Model.model_validate(call(client, "GET", "/v1/models/fake").json())
    replies.Version.model_validate(call(client, "GET", "/version").json())
    for is_healthy in (True, False):
        client.is_healthy = is_healthy
        replies.Health.model_validate(call(client, "GET", "/health").json())


def test_latencies_are_exported_before_the_first_token() -> None:
    text = bare(call(FakeEngineClient(), "GET", "/metrics").text)
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f'manta_{name}_seconds_count{{endpoint="completions"}} 0.0' in text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("tier", ["flex", "auto", "default", "priority", "unknown", None])
def test_service_tier_flex_ranks_below_all_others(path: str, tier: str | None) -> None:
    client = FakeEngineClient()
    asked = {"messages": [USER]} if path == CHAT else {"prompt": "abc"}
    said = "flex" if tier == "flex" else None
    reply = post(path, client, **asked, max_tokens=3, service_tier=tier)
    assert reply.json()["service_tier"] == said
    chunks = events(post(path, client, **asked, max_tokens=3, service_tier=tier, stream=True))
    assert {chunk.get("service_tier") for chunk in chunks} == {said}
    assert [sequence.is_flex for sequence in client.started] == [tier == "flex"] * 2
