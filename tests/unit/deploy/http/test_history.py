"""What other servers' replies, and cut or broken ones, may look like when they are sent back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_calls import CHAT, USER, post
from tests.support.fake_client import FakeEngineClient

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WIDE = 10**30


def rendered(path: str, **body: Any) -> list[dict[str, Any]]:
    """The messages that reach the tokenizer."""
    client = FakeEngineClient(4096, tool_format="hermes")
    reply = post(path, client, **body)
    assert reply.status_code == 200, reply.text
    messages: list[dict[str, Any]] = client.chat_calls[0]["messages"]
    return messages


def chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return rendered(CHAT, messages=[USER, *messages, USER], max_tokens=4)[1:-1]


def respond(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return rendered("/v1/responses", input=[USER, *items, USER], max_output_tokens=16)[1:-1]


def converse(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return rendered("/v1/messages", messages=[USER, *messages, USER], max_tokens=4)[1:-1]


def said(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text, **more}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well.\nNo."),
        ({"content": "Well.", "refusal": None, "function_call": None, "audio": None}, "Well."),
        ({"content": None, "tool_calls": None, "annotations": [], "provider_fields": {}}, ""),
        ({"content": None, "tool_calls": [], "reasoning_details": [{"type": "x"}]}, ""),
    ],
)
def test_assistants_of_chats(fields: dict[str, Any], text: str) -> None:
    assert chat({"role": "assistant", **fields}) == said(text)


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([], []),
        ([{"type": "refusal", "refusal": "No."}], ["No."]),
        ([{"type": "text", "text": ""}, {"type": "refusal", "refusal": "No."}], ["", "No."]),
        ([{"type": "output_text", "text": "Well.", "annotations": []}], ["Well."]),
    ],
)
def test_parts_of_chats(parts: list[dict[str, Any]], texts: list[str]) -> None:
    found = [{"type": "text", "text": text} for text in texts]
    assert chat({"role": "assistant", "content": parts}) == [
        {"role": "assistant", "content": found}
    ]
    if parts:
        refused = [{"role": "assistant", "content": parts, "refusal": "Never."}]
        assert chat(*refused)[0]["content"] == [*found, {"type": "text", "text": "Never."}]


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
    ],
)
def test_thoughts_among_the_parts_are_reasoning(thought: dict[str, Any]) -> None:
    parts = [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]
    (message,) = chat({"role": "assistant", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}]
    assert message["reasoning_content"] == "Hm."
    (message,) = chat({"role": "assistant", "content": parts, "reasoning_content": "So."})
    assert message["reasoning_content"] == "So."
    reply = post(CHAT, messages=[{"role": "user", "content": parts}])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].content"


ARGUMENTS = [
    *((text, text) for text in ("", "{", '{"a": "b', "[1]", "null", '"{}"', "f(1)")),
    *((value, text) for value, text in ((3, "3"), ([1], "[1]"), (True, "true"))),
    ({"a": 1}, {"a": 1}),
    ({"a": [WIDE]}, f'{{"a": [{WIDE}]}}'),
]


@pytest.mark.parametrize(("given", "read"), ARGUMENTS)
def test_arguments(given: Any, read: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": given}}
    (message,) = chat({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == read
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": given}
    (message,) = respond({**item, "status": "incomplete", "id": None})
    assert message["tool_calls"][0]["function"]["arguments"] == read
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": given}
    (message,) = converse({"role": "assistant", "content": [block]})
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_arguments_that_are_null_or_missing() -> None:
    for function in ({"name": "f"}, {"name": "f", "arguments": None}):
        (message,) = chat({"role": "assistant", "tool_calls": [{**CALL, "function": function}]})
        assert message["tool_calls"][0]["function"]["arguments"] == "{}"
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": None}
    assert respond(item)[0]["tool_calls"][0]["function"]["arguments"] == ""
    for more in ({}, {"input": None}):
        block = {"type": "tool_use", "id": "c1", "name": "f", **more}
        (message,) = converse({"role": "assistant", "content": [block]})
        assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_results_of_tools() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": ""}
    for content in ("", None):
        assert chat({**result, "content": content}) == [result]
    assert chat({"role": "tool", "content": "a"}) == [{"role": "tool", "content": "a"}]
    twice = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    assert chat(twice, result, result) == [twice, result, result]
    output = {"type": "function_call_output", "call_id": "c1", "output": None}
    assert respond(output) == [result]
    for more in ({}, {"content": None}, {"content": []}, {"content": [], "is_error": True}):
        block = {"type": "tool_result", "tool_use_id": "c1", **more}
        assert converse({"role": "user", "content": [block]}) == [result]


def test_items_of_responses() -> None:
    refused = {"type": "refusal", "refusal": "No."}
    item = {"type": "message", "role": "assistant", "status": "incomplete", "phase": "final"}
    assert respond({**item, "content": [refused]}) == said("No.")
    assert respond({**item, "content": []}) == said("")
    assert respond({**item, "content": None}) == said("")
    reasoning = {"type": "reasoning", "summary": [], "status": "incomplete"}
    assert respond({**reasoning, "content": None, "encrypted_content": "x"}) == []
    thought = {**reasoning, "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert respond(thought) == said("", reasoning_content="Hm.")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    message = {**item, "content": [{"type": "output_text", "text": "a"}]}
    assert respond(message, call, message) == said("aa", tool_calls=[CALL])


def test_blocks_of_messages() -> None:
    for content in (None, [], "", [{"type": "text", "text": ""}]):
        assert converse({"role": "assistant", "content": content}) == said("")
    assert converse({"role": "assistant"}) == said("")
    thought = {"type": "thinking", "thinking": "Hm.", "signature": None}
    assert converse({"role": "assistant", "content": [thought]}) == said(
        "", reasoning_content="Hm."
    )
    for content in (None, {}):
        reply = post("/v1/messages", max_tokens=4, messages=[{"role": "user", "content": content}])
        assert reply.status_code == 400
