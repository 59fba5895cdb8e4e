"""Tools and reasoning in chats: scripted outputs, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.api_calls import CHAT, USER, error_of, events, post
from tests.support.fake_client import FakeEngineClient

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
OUTPUTS = {
    "one call": ("hermes", CALL),
    "text and two calls": ("hermes", f"Well.\n{CALL}\n{CALL_G}"),
    "no call": ("hermes", "I can't <tool_call> that."),
    "a call cut off": ("hermes", CALL[:50]),
    "a list": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
    "a named call": ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
    "an object": ("llama3_json", '{"name": "f", "parameters": {"a": 1}}'),
    "values between tags": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    "keys and values": (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    "invocations": (
        "minimax_m2",
        'Well.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
        '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    ),
    "a list behind a token": ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'),
    "Python": ("pythonic", "[f(a=1), g()]"),
    "another object": ("llama3_json", '{"name": "h", "parameters": {"a": 1}}'),
}


def fake(script: str, tool_format: str = "hermes", reasons: bool = False) -> FakeEngineClient:
    client = FakeEngineClient(1024, tool_format=tool_format, reasons=reasons)
    client.script = script
    return client


def whole(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    reply = post(CHAT, client, **{"messages": [USER], "tools": [TOOL, OTHER], **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def streamed(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    """A reply as a client puts it together from a stream."""
    body = {"messages": [USER], "tools": [TOOL, OTHER], "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    *chunks, last = events(post(CHAT, client, **body))
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": []}
    finish = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        finish = choice["finish_reason"] or finish
        for key in ("content", "reasoning"):
            if delta.get(key):
                message[key] = (message[key] or "") + delta[key]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({key: call[key] for key in ("id", "type", "function")})
            else:
                function = message["tool_calls"][call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish, "usage": last["usage"]}


def harmony(script: str) -> FakeEngineClient:
    client = FakeEngineClient(1024, tool_format="gpt_oss", reasons=True, reasoning_format="gpt_oss")
    client.script = script
    return client


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in call.items() if key != "id"} for call in calls]


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_stream_has_the_parts_of_the_reply(name: str) -> None:
    tool_format, script = OUTPUTS[name]
    reply = whole(fake(script, tool_format))
    got = streamed(fake(script, tool_format))
    (choice,) = reply["choices"]
    assert got["message"]["content"] == choice["message"]["content"]
    calls = choice["message"].get("tool_calls", [])
    assert without_ids(got["message"]["tool_calls"]) == without_ids(calls)
    assert got["finish_reason"] == choice["finish_reason"]
    assert got["usage"] == reply["usage"]


def test_calls_have_names_arguments_and_ids() -> None:
    (choice,) = whole(fake(f"Well.\n{CALL}\n{CALL_G}"))["choices"]
    message = choice["message"]
    assert message["content"] == "Well." and choice["finish_reason"] == "tool_calls"
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert second["function"] == {"name": "g", "arguments": "{}"}
    assert first["type"] == "function" and first["id"] != second["id"]
    assert first["id"].startswith("call_") and len(first["id"]) == 29
    (mistral,) = whole(fake('[TOOL_CALLS]f[ARGS]{"a": 1}', "mistral"))["choices"]
    assert len(mistral["message"]["tool_calls"][0]["id"]) == 9


def test_a_reply_without_calls_is_what_it_was() -> None:
    for script in ("I can't <tool_call> that. ", '{"name": "f"}'):
        (choice,) = whole(fake(script))["choices"]
        assert choice["message"]["content"] == script
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_without_tools_or_with_none_nothing_is_parsed() -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        (choice,) = whole(fake(CALL), **fields)["choices"]
        assert choice["message"]["content"] == CALL


def test_finish_reasons() -> None:
    (choice,) = whole(fake(CALL), max_tokens=44)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":'
    named = {"type": "function", "function": {"name": "f"}}
    (choice,) = whole(fake(CALL), tool_choice=named)["choices"]
    assert choice["finish_reason"] == "stop" and len(choice["message"]["tool_calls"]) == 1


def test_a_second_call_is_dropped_where_one_is_allowed() -> None:
    (choice,) = whole(fake(f"{CALL}\n{CALL_G}"), parallel_tool_calls=False)["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]


def test_the_template_gets_the_tools_without_the_apis_words() -> None:
    client = fake("ok")
    whole(client)
    (got,) = client.chat_calls
    function = {key: value for key, value in TOOL["function"].items() if key != "strict"}
    assert got["tools"] == [{"type": "function", "function": function}, OTHER]


@pytest.mark.parametrize(
    ("fields", "demands"),
    [
        ({"tools": [OTHER]}, False),
        ({}, True),  # one tool is strict
        ({"tool_choice": "none"}, False),
        ({"tools": [OTHER], "tool_choice": "required"}, True),
        ({"tools": [OTHER], "response_format": {"type": "json_object"}}, True),
    ],
)
def test_a_grammar_is_used_where_something_is_demanded(
    fields: dict[str, Any], demands: bool
) -> None:
    client = fake("ok")
    whole(client, **fields)
    assert [spec.payload["type"] for spec in client.checked] == ["tool_calls"] * demands
    (request,) = client.started
    constraint = request.params.constraint
    assert (None if constraint is None else constraint.field) == ("tools" if demands else None)
    assert request.params.skip_special_tokens == (fields.get("tool_choice") == "none")


def test_some_of_the_tools_may_be_allowed() -> None:
    named = [{"type": "function", "function": {"name": name}} for name in ("f", "x")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named[:1]}}
    client = fake(CALL)
    (reply,) = whole(client, tool_choice=choice)["choices"]
    assert reply["message"]["tool_calls"] and len(client.checked) == 1
    choice["allowed_tools"] = {"mode": "auto", "tools": named}
    refused = post(CHAT, fake(CALL), messages=[USER], tools=[TOOL, OTHER], tool_choice=choice)
    assert refused.status_code == 400 and "'x'" in refused.json()["error"]["message"]


def test_only_strict_schemas_bind_calls_that_the_model_chooses() -> None:
    client = fake("ok")
    whole(client, tools=[TOOL, {**OTHER, "function": {"name": "g", "parameters": {"x": 1}}}])
    first, second = json.loads(client.checked[0].payload["value"])["calls"]
    assert first["schema"] == TOOL["function"]["parameters"]
    assert second["schema"] == {"type": "object"}


def test_reasoning_is_split_off() -> None:
    script = f"<think>\nHm.\n</think>\n\nSo.\n{CALL}"
    reply = whole(fake(script, reasons=True))
    message = reply["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert message["content"] == "So." and len(message["tool_calls"]) == 1
    tokens = len("<think>\nHm.\n</think>")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}
    got = streamed(fake(script, reasons=True))
    assert got["message"]["reasoning"] == "Hm." and got["message"]["content"] == "So."
    assert got["usage"] == reply["usage"]


def test_reasoning_may_begin_in_the_prompt() -> None:
    ask = {"messages": [{"role": "user", "content": "Hm? <think>\n"}], "tools": []}
    message = whole(fake("Hm.</think>So.", reasons=True), **ask)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "So.")
    message = whole(fake("Hm.", reasons=True), **ask)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", None)


def test_reasoning_can_be_left_out() -> None:
    fields: dict[str, Any] = {"tools": [], "include_reasoning": False}
    message = whole(fake("<think>Hm.</think>So.", reasons=True), **fields)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "So.")
    got = streamed(fake("<think>Hm.</think>So.", reasons=True), **fields)["message"]
    assert (got["reasoning"], got["content"]) == (None, "So.")


def test_what_is_demanded_begins_behind_the_reasoning() -> None:
    form = {"type": "json_object"}
    for content, is_open in (("<think>", True), ("", False)):
        client = fake("{}", reasons=True)
        ask = [{"role": "user", "content": content}]
        whole(client, messages=ask, tools=[], response_format=form)
        assert client.checked[0].payload["thinking"]["is_open"] is is_open


def test_reasoning_effort_goes_to_the_template() -> None:
    client = fake("ok", reasons=True)
    whole(client, reasoning_effort="high", chat_template_kwargs={"x": 1})
    whole(client, reasoning_effort="none")
    kwargs = [call["template_kwargs"] for call in client.chat_calls]
    assert kwargs == [
        {"reasoning_effort": "high", "x": 1},
        {"reasoning_effort": "none", "enable_thinking": False},
    ]


def test_a_model_that_calls_no_tools_says_so() -> None:
    error = error_of(post(CHAT, messages=[USER], tools=[TOOL]))
    assert error["param"] == "tools" and "tool_call_parser" in error["message"]
    reply = post(CHAT, messages=[USER], tools=[TOOL], tool_choice="none")
    assert reply.status_code == 200


@pytest.mark.parametrize("stop", ["1", " 1}"])
def test_a_call_that_a_stop_string_cut_is_not_to_be_run(stop: str) -> None:
    client = fake(CALL)
    (choice,) = whole(client, stop=[stop])["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "stop"
    assert not made["function"]["arguments"].endswith("}")
    assert streamed(fake(CALL), stop=[stop])["finish_reason"] == "stop"
    body = {"messages": [USER], "max_tokens": 300, "stop_sequences": [stop]}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    message = post("/v1/messages", fake(CALL), **body, tools=[tool]).json()
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == stop
    items = {"input": "hi", "tools": [{"type": "function", "name": "f"}], "stop": [stop]}
    (item,) = post("/v1/responses", fake(CALL), **items).json()["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CHANNEL_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def test_thoughts_and_calls_in_channels() -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    script = f'{THOUGHT}{preamble}{CHANNEL_CALL}{{"a": 1}}'
    reply = whole(harmony(script))
    (choice,) = reply["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "I look.")
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len("Hm.")
    got = streamed(harmony(script))
    assert got["message"]["reasoning"] == "Hm." and got["message"]["content"] == "I look."
    assert without_ids(got["message"]["tool_calls"]) == without_ids([made])
    assert got["usage"] == reply["usage"] and got["finish_reason"] == "tool_calls"


def test_answers_in_channels() -> None:
    script = f"{THOUGHT}<|channel|>final<|message|>Yes."
    for tools in ([], [TOOL]):
        (choice,) = whole(harmony(script), tools=tools)["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Yes.")
        assert choice["finish_reason"] == "stop"
    message = whole(harmony(f"{CHANNEL_CALL}{{}}"), tool_choice="none")["choices"][0]["message"]
    assert message["content"] == "{}" and "tool_calls" not in message


def test_a_call_in_a_channel_that_is_cut() -> None:
    (choice,) = whole(harmony(f'{THOUGHT}{CHANNEL_CALL}{{"a": '))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_what_is_demanded_of_channels() -> None:
    client = harmony("")
    whole(client, tools=[], response_format={"type": "json_object"})
    thinking = client.checked[0].payload["thinking"]
    assert thinking["answer"] == "<|channel|>final<|message|>" and not thinking["is_open"]
    client = harmony("")
    whole(client, tool_choice="required")
    assert client.checked[0].payload["type"] == "tool_calls"
    assert "commentary to=functions.f" in client.checked[0].payload["value"]
