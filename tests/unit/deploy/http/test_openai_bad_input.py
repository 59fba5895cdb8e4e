"""Bad requests: each is refused by the field's name, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.http.api import build_api
from deploy.http.openai.chat import ChatCompletionRequest
from deploy.http.openai.completions import CompletionRequest
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.api_calls import CHAT, COMPLETIONS, JSON, USER, call, error_of, events, post
from tests.support.fake_client import FakeEngineClient

LONG = [65] * 256


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    # Wrong types and ranges of sampling fields
    (COMPLETIONS, {"temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"temperature": True}, 400, "temperature"),
    (COMPLETIONS, {"temperature": -0.1}, 400, "temperature"),
    (COMPLETIONS, {"temperature": 1e30}, 400, "temperature"),
    (COMPLETIONS, {"temperature": 10**400}, 400, "temperature"),
    (COMPLETIONS, {"top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"top_p": 1.5}, 400, "top_p"),
    (COMPLETIONS, {"top_p": []}, 400, "top_p"),
    (COMPLETIONS, {"top_k": 1.5}, 400, "top_k"),
    (COMPLETIONS, {"top_k": -2}, 400, "top_k"),
    (COMPLETIONS, {"top_k": 10**30}, 400, "top_k"),
    (COMPLETIONS, {"min_p": 2}, 400, "min_p"),
    (COMPLETIONS, {"presence_penalty": 3}, 400, "presence_penalty"),
    (COMPLETIONS, {"frequency_penalty": {}}, 400, "frequency_penalty"),
    (COMPLETIONS, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETIONS, {"repetition_penalty": 5e-324}, 400, "repetition_penalty"),
    (COMPLETIONS, {"seed": 2**63}, 400, "seed"),
    (COMPLETIONS, {"seed": 1.0}, 400, "seed"),
    (COMPLETIONS, {"seed": "1"}, 400, "seed"),
    (COMPLETIONS, {"n": 0}, 400, "n"),
    (COMPLETIONS, {"n": 129}, 400, "n"),
    (COMPLETIONS, {"n": 10**30}, 400, "n"),
    (COMPLETIONS, {"n": True}, 400, "n"),
    (COMPLETIONS, {"n": 128, "prompt": ["a"] * 17}, 400, "n"),
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": -5}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 16.0}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 257}, 400, "max_tokens"),
    (COMPLETIONS, {"min_tokens": 17}, 400, "min_tokens"),
    (COMPLETIONS, {"min_tokens": -1}, 400, "min_tokens"),
    (COMPLETIONS, {"stop": 3}, 400, "stop"),
    (COMPLETIONS, {"stop": [""]}, 400, "stop"),
    (COMPLETIONS, {"stop": ["a"] * 17}, 400, "stop"),
    (COMPLETIONS, {"stop": ["a", 1]}, 400, "stop"),
    (COMPLETIONS, {"stop_token_ids": [300]}, 400, "stop_token_ids"),
    (COMPLETIONS, {"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": "x"}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"\u0663": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"logit_bias": [1]}, 400, "logit_bias"),
    (COMPLETIONS, {"logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, 400, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, 400, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (COMPLETIONS, {"echo": "yes"}, 400, "echo"),
    (COMPLETIONS, {"stream": 1}, 400, "stream"),
    (COMPLETIONS, {"stream_options": {}}, 400, "stream_options"),
    (COMPLETIONS, {"stream": True, "stream_options": 1}, 400, "stream_options"),
    (
        COMPLETIONS,
        {"stream": True, "stream_options": {"include_usage": 1}},
        400,
        "stream_options.include_usage",
    ),
    (COMPLETIONS, {"priority": 2**40}, 400, "priority"),
    (COMPLETIONS, {"request_id": "a b"}, 400, "request_id"),
    # Prompts
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [None]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [True]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": 7}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [300]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": LONG}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 70_000}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 3000}, 400, "prompt"),
    (COMPLETIONS, {"prompt": LONG[:250], "max_tokens": 7}, 400, "max_tokens"),
    # Fields of others, and nobody's
    (COMPLETIONS, {"model": "gpt-4"}, 404, "model"),
    (COMPLETIONS, {"model": 3}, 400, "model"),
    (COMPLETIONS, {"temprature": 1}, 400, "temprature"),
    (COMPLETIONS, {"suffix": "x"}, 400, "suffix"),
    (COMPLETIONS, {"best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {"use_beam_search": True}, 400, "use_beam_search"),
    (COMPLETIONS, {"cache_salt": ""}, 400, "cache_salt"),
    (COMPLETIONS, {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    (COMPLETIONS, {"allowed_token_ids": [300]}, 400, "allowed_token_ids"),
    (COMPLETIONS, {"bad_words": "x"}, 400, "bad_words"),
    (COMPLETIONS, {"bad_words": [""]}, 400, "bad_words"),
    (COMPLETIONS, {"bad_words": ["x"] * 129}, 400, "bad_words"),
    (COMPLETIONS, {"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 256}, 400, "truncate_prompt_tokens"),
    (COMPLETIONS, {"truncation_side": "middle"}, 400, "truncation_side"),
    (COMPLETIONS, {"stream_interval": 0}, 400, "stream_interval"),
    (COMPLETIONS, {"stream_interval": True}, 400, "stream_interval"),
    (COMPLETIONS, {"logprob_token_ids": [1]}, 400, "logprob_token_ids"),
    (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": []}, 400, "logprob_token_ids"),
    (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [300]}, 400, "logprob_token_ids"),
    (COMPLETIONS, {"messages": [USER]}, 400, "messages"),
    # Chats
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [USER] * 2049}, 400, "messages"),
    (COMPLETIONS, {"stop_token_ids": [1] * 1025}, 400, "stop_token_ids"),
    (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    (COMPLETIONS, {"allowed_token_ids": [1] * 301}, 400, "allowed_token_ids"),
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{**USER, "audio": {"id": "a"}}]}, 400, "messages[0].audio"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content",
    ),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "messages"),
    (CHAT, {"messages": [{**USER, "content": "x" * 300}]}, 400, "messages"),
    (CHAT, {"max_completion_tokens": 250}, 400, "max_completion_tokens"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"max_tokens": 250}, 400, "max_tokens"),
    (CHAT, {"logprobs": 1}, 400, "logprobs"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, 400, "tools[0].custom.name"),
    (CHAT, {"tools": [tool("f g")]}, 400, "tools[0].function.name"),
    (CHAT, {"tools": [tool("f", {"type": "string"})]}, 400, "tools[0].function.parameters"),
    (CHAT, {"tools": [tool("f")]}, 400, "tools"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        400,
        "guided_regex",
    ),
    (CHAT, {"structured_outputs": {}}, 400, "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs"),
    (CHAT, {"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice"),
    (CHAT, {"guided_choice": [1]}, 400, "guided_choice[0]"),
    (CHAT, {"reasoning_effort": "Very much"}, 400, "reasoning_effort"),
    (CHAT, {"modalities": ["audio"]}, 400, "modalities"),
    (CHAT, {"audio": {}}, 400, "audio"),
    (CHAT, {"prompt": "x"}, 400, "prompt"),
    (CHAT, {"chat_template": "x"}, 400, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"a": [{"b": 2**64}]}}, 400, "chat_template_kwargs"),
    (
        CHAT,
        {"add_generation_prompt": True, "continue_final_message": True},
        400,
        "continue_final_message",
    ),
    (CHAT, {"model": "gpt-4"}, 404, "model"),
]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "[0].text", "provide"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
            "valid string",
        ),
        ({"tool_choice": {"type": "function", "function": {}}}, "function.name", "provide"),
        ({"tool_choice": 4}, "tool_choice", "'required' or an object"),
        ({"guided_json": 4}, "guided_json", "valid string or an object"),
    ],
)
def test_of_what_may_be_this_or_that_the_place_is_named(
    fields: dict[str, Any], param: str, words: str
) -> None:
    reply = post(CHAT, **{"messages": [USER]} | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"].endswith(param), error
    assert words in error["message"] and error["param"] in error["message"]


def test_bad_input_is_refused_by_name_and_the_server_goes_on() -> None:
    client = FakeEngineClient()
    wrong = []

    async def run() -> None:
        transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for path, fields, status, param in BAD:
                base = {"prompt": "x"} if path == COMPLETIONS else {"messages": [USER]}
                for stream in ({}, {"stream": True}):
                    if stream and ("stream" in fields or "stream_options" in fields):
                        continue
                    reply = await http.post(path, json=base | stream | fields)
                    kind = reply.headers["content-type"]
                    error = error_of(reply) if kind == "application/json" else {}
                    got = (reply.status_code, error.get("param"), error.get("type"))
                    if got != (status, param, "invalid_request_error"):
                        wrong.append((path, str(fields)[:80], got, reply.text[:200]))
                    good = await http.post(path, json=base | {"max_tokens": 1})
                    assert good.status_code == 200, (fields, good.text)

    asyncio.run(run())
    assert not wrong
    assert client.open == 0


def test_codes_of_errors() -> None:
    assert error_of(post(COMPLETIONS, prompt="x", model="y"))["code"] == "model_not_found"
    assert error_of(post(COMPLETIONS, prompt=LONG))["code"] == "context_length_exceeded"
    error = error_of(post(COMPLETIONS, prompt=LONG[:250], max_tokens=7))
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"] and "257 tokens" in error["message"]
    assert error_of(post(CHAT, messages=[USER], functions=[{}]))["code"] == "unsupported_parameter"


def test_broken_json_and_large_bodies() -> None:
    client = FakeEngineClient()
    reply = call(
        client, "POST", COMPLETIONS, content=b'{"prompt": "x", "temperature": NaN}', headers=JSON
    )
    assert (reply.status_code, error_of(reply)["param"]) == (400, "temperature")
    reply = call(client, "POST", COMPLETIONS, content=b'{"prompt": ', headers=JSON)
    assert (reply.status_code, "line 1" in error_of(reply)["message"]) == (400, True)
    small = ApiSettings(ServerOptions(max_body_bytes=1024))
    body = json.dumps({"prompt": "x" * 1024}).encode()
    reply = call(client, "POST", COMPLETIONS, content=body, headers=JSON, api_settings=small)
    assert reply.status_code == 413
    assert error_of(reply)["code"] == "request_too_large"

    async def chunks() -> Any:  # without Content-Length
        yield body[:60]
        yield body[60:]

    reply = call(client, "POST", COMPLETIONS, content=chunks(), headers=JSON, api_settings=small)
    assert reply.status_code == 413


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "given",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "text/json",
        "é",
        "",
        None,
    ],
)
def test_what_a_web_page_may_send_unasked_is_refused(path: str, given: str | None) -> None:
    """No engine sees it; the error names what came and what must."""
    client = FakeEngineClient()
    body = json.dumps({"prompt": "x", "messages": [USER]}).encode()
    headers = {} if given is None else {"Content-Type": given.encode()}
    reply = call(client, "POST", path, content=body, headers=headers)
    assert reply.status_code == 415
    assert error_of(reply)["code"] == "unsupported_media_type"
    assert "application/json" in error_of(reply)["message"]
    assert client.started == []


@pytest.mark.parametrize(
    "given",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/a.b+json",
    ],
)
def test_json_by_any_of_its_names_is_taken(given: str) -> None:
    reply = call(
        FakeEngineClient(),
        "POST",
        COMPLETIONS,
        content=b'{"prompt": "x"}',
        headers={"Content-Type": given},
    )
    assert reply.status_code == 200, reply.text


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "text", "hi", 1, 0, -1, 2**31, 2**63, 1e308]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["role", "content"]), inner)
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {"model", "request_id", "no_such_field"}
    | set(CompletionRequest.model_fields)
    | set(CompletionRequest.unsupported)
    | set(ChatCompletionRequest.model_fields)
    | set(ChatCompletionRequest.unsupported)
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(min_size=1, max_size=5) | st.lists(st.integers(0, 299), max_size=4),
        "messages": st.just([USER]),
    },
).flatmap(
    lambda base: st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4).map(
        lambda extra: {**base, **extra}
    )
)


class Prober:
    """Sends bodies to one application and checks that it never fails."""

    def __init__(self) -> None:
        self.client = FakeEngineClient(max_model_len=40)
        transport = httpx.ASGITransport(
            build_api(lambda: ServedModels(self.client)), raise_app_exceptions=False
        )
        self._http = httpx.AsyncClient(transport=transport, base_url="http://test")
        self.statuses: set[int] = set()

    def check(self, runner: asyncio.Runner, path: str, content: bytes) -> None:
        reply = runner.run(self._http.post(path, content=content, headers=JSON))
        self.statuses.add(reply.status_code)
        assert reply.status_code in (200, 400, 404), reply.text
        if reply.status_code != 200:
            error_of(reply)
        elif reply.headers["content-type"] != "application/json":
            assert "error" not in events(reply)[-1]
        assert self.client.open == 0
        assert not asyncio.all_tasks(runner.get_loop())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_json_makes_the_server_fail(path: str) -> None:
    prober = Prober()
    with asyncio.Runner() as runner:

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(BODIES)
        def check(body: dict[str, Any]) -> None:
            prober.check(runner, path, json.dumps(body).encode())

        check()
    assert prober.statuses >= {200, 400}


def test_no_bytes_make_the_server_fail() -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}'
    prober = Prober()
    with asyncio.Runner() as runner:

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=10), st.integers(0, len(body)), st.integers(0, 2))
        def check(noise: bytes, at: int, cut: int) -> None:
            prober.check(runner, CHAT, body[:at] + noise + body[at + cut :])

        check()
    assert prober.statuses >= {200, 400}
