"""`/v1/messages`: fields, blocks, events and errors, over scripted outputs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.api_calls import call, chat, post
from tests.support.fake_client import FakeEngineClient

PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}
TOOL = {
    "name": "f",
    "description": "Does it.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def fake(script: str | None = None, reasons: bool = False) -> FakeEngineClient:
    client = FakeEngineClient(1024, tool_format="hermes", reasons=reasons)
    client.script = script
    return client


def whole(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    reply = post(PATH, client, **{"messages": [USER], "max_tokens": 300} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in reply.text.removesuffix("\n\n").split("\n\n"):
        *_, kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def streamed(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    """The message that a client puts together from the events."""
    body = {"messages": [USER], "max_tokens": 300, "stream": True} | fields
    start, *middle, end, stop = events_of(post(PATH, client, **body))
    message: dict[str, Any] = start["message"]
    assert start["type"] == "message_start" and message["content"] == []
    texts: list[str] = []
    is_open = False
    for event in middle:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            is_open, texts = True, []
            message["content"].append(event["content_block"])
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if kind == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(texts))
        elif event["delta"]["type"] == "input_json_delta":
            texts.append(event["delta"]["partial_json"])
        else:
            (key,) = event["delta"].keys() - {"type"}
            block[key] += event["delta"][key]
    assert not is_open
    assert (end["type"], stop) == ("message_delta", {"type": "message_stop"})
    return message | end["delta"] | {"usage": end["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_a_message() -> None:
    client = fake("Hello.")
    client.num_cached = 3
    got = whole(client, model="fake")
    assert got.pop("id").startswith("msg_")
    num_prompt = len("[user]hi")
    assert got == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 6,
        },
    }


SHOWN = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
OMITTED = {"thinking": {"type": "enabled", "display": "omitted"}}


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ("Hello.", {}),
        ("Hello.", {"max_tokens": 3}),
        ("Hello.", {"stop_sequences": ["l"]}),
        ("", {"max_tokens": 3}),
        (CALL, {"tools": [TOOL]}),
        (f"Well.\n{CALL}\n{CALL}", {"tools": [TOOL]}),
        ("I can't <tool_call> that.", {"tools": [TOOL]}),
        (f"<think>Hm.</think>Well. {CALL} Done.", {"tools": [TOOL], **SHOWN}),
        (f"<think>Hm.</think>Well. {CALL} Done.", {"tools": [TOOL], **OMITTED}),
        (f"<think>Hm.</think>Well. {CALL} Done.", {"tools": [TOOL]}),
    ],
)
def test_a_stream_is_the_message_in_pieces(script: str, fields: dict[str, Any]) -> None:
    reasons = "think" in script
    script = script or "a"
    first = whole(fake(script, reasons), **fields)
    assert without_ids(streamed(fake(script, reasons), **fields)) == without_ids(first)


def test_why_it_stopped() -> None:
    assert whole(fake("Hello."), max_tokens=3)["stop_reason"] == "max_tokens"
    got = whole(fake("Hello."), stop_sequences=["x", "o"])
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "o")
    assert got["content"] == [{"type": "text", "text": "Hell"}]
    assert whole(fake(CALL), tools=[TOOL])["stop_reason"] == "tool_use"


def test_calls_are_blocks() -> None:
    first, second = whole(fake(f"Well.\n{CALL}"), tools=[TOOL])["content"]
    assert first == {"type": "text", "text": "Well."}
    assert second.pop("id").startswith("toolu_")
    assert second == {"type": "tool_use", "name": "f", "input": {"a": 1}}
    (cut,) = whole(fake(CALL), tools=[TOOL], max_tokens=45)["content"]
    assert cut["input"] == {"INVALID_JSON": '{"a": '}


def test_thinking_is_shown_if_asked_for() -> None:
    script = "<think>Hm.</think>So."
    hidden = whole(fake(script, reasons=True))
    assert hidden["content"] == [{"type": "text", "text": "So."}]
    thought, answer = whole(fake(script, reasons=True), **SHOWN)["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert answer == {"type": "text", "text": "So."}


def test_the_text_of_thinking_is_left_out_if_asked_for() -> None:
    script = "<think>Hm.</think>So."
    thought, answer = whole(fake(script, reasons=True), **OMITTED)["content"]
    assert thought == {"type": "thinking", "thinking": "", "signature": ""}
    assert answer == {"type": "text", "text": "So."}
    told = {"thinking": {"type": "adaptive", "display": "updates"}}
    assert whole(fake(script, reasons=True), **told)["content"][0]["thinking"] == "Hm."


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}])
def test_templates_learn_whether_to_think(thinking: dict[str, Any] | None) -> None:
    client = fake("ok")
    whole(client, **({} if thinking is None else {"thinking": thinking}))
    shown = thinking == {"type": "adaptive"}
    assert client.chat_calls[0]["template_kwargs"] == {"enable_thinking": shown}


def test_the_conversation_is_the_same_as_a_chats() -> None:
    client = fake("ok")
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "4", "is_error": False},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    whole(client, messages=blocks, system=[{"type": "text", "text": "s"}], tools=[TOOL])
    function = {"name": "f", "arguments": {"a": 1}}
    called = {"id": "t1", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "Hm.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "user", "content": "and?"},
    ]
    parameters = {"name": "f", "description": "Does it.", "parameters": TOOL["input_schema"]}
    tool = {"type": "function", "function": parameters}
    chat(client, messages=messages, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    first, second = client.chat_calls
    assert first == second


def test_an_assistants_last_message_is_continued() -> None:
    client = fake("ok")
    for content in ("a", [{"type": "text", "text": "a"}]):
        messages = [USER, {"role": "assistant", "content": content}]
        whole(client, messages=messages)
        asked = client.chat_calls[-1]
        assert asked["continue_final_message"] and not asked["add_generation_prompt"]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    bad = post(
        PATH, client, messages=[USER, {"role": "assistant", "content": [call]}], max_tokens=3
    )
    assert bad.status_code == 400 and "messages" in bad.json()["error"]["message"]


def test_the_same_tokens_as_a_chat() -> None:
    first, second = FakeEngineClient(), FakeEngineClient()
    whole(first, max_tokens=4, temperature=0, top_p=0.5, top_k=3, stop_sequences=["zz"])
    chat(second, max_tokens=4, temperature=0, top_p=0.5, top_k=3, stop=["zz"])
    ours, theirs = first.started[0].params, second.started[0].params
    theirs.seed = ours.seed
    assert ours == theirs
    assert first.started[0].prompt_ids == second.started[0].prompt_ids


@pytest.mark.parametrize(
    ("choice", "demanded"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
        ({"type": "none"}, False),
    ],
)
def test_tool_choices(choice: dict[str, Any], demanded: bool) -> None:
    client = fake(f"{CALL}{CALL}")
    got = whole(client, tools=[TOOL], tool_choice=choice)
    assert bool(client.checked) == demanded
    kinds = [block["type"] for block in got["content"]]
    several = ["tool_use"] * 2 if choice["type"] == "any" else ["tool_use"]
    assert kinds == (["text"] if choice["type"] == "none" else several)


def test_tokens_are_counted() -> None:
    client = fake()
    reply = post(f"{PATH}/count_tokens", client, messages=[USER], system="s", tools=[TOOL])
    assert reply.json() == {"input_tokens": len("[system]s[user]hi")}
    assert client.chat_calls[0]["tools"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "messages": []}, "messages"),
        ({"max_tokens": 3, "messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        (
            {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "image",
        ),
        ({"max_tokens": 3, "temperature": 2}, "temperature"),
        ({"max_tokens": 3, "stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 3, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"max_tokens": 3, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 3, "tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"max_tokens": 3, "compaction": {"type": "summarize"}}, "compaction"),
        ({"max_tokens": 3, "mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": 3, "frobnicate": 1}, "frobnicate"),
    ],
)
def test_errors_have_their_own_shape(body: dict[str, Any], words: str) -> None:
    reply = post(PATH, fake(), **{"messages": [USER], **body})
    error = reply.json()
    assert reply.status_code == 400 and list(error) == ["type", "error"]
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


def test_other_errors_too() -> None:
    client = fake()
    other = post(PATH, client, messages=[USER], max_tokens=1, model="other")
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    assert call(client, "GET", PATH).json()["type"] == "error"
    assert post(f"{PATH}/count_tokens", client, messages=5).json()["type"] == "error"
    assert call(client, "POST", PATH, content=b"{}").status_code == 415
    client.error_at = (0, ValueError("secret"))
    failed = post(PATH, client, messages=[USER], max_tokens=3)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    client.error_at = (2, ValueError("secret"))
    last = events_of(post(PATH, client, messages=[USER], max_tokens=5, stream=True))[-1]
    assert last["error"]["type"] == "api_error" and "secret" not in str(last)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_an_answer_may_have_a_form(with_tools: bool, old: bool) -> None:
    given = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {}}}}
    fields: dict[str, Any] = (
        {"output_format": given} if old else {"output_config": {"format": given}}
    )
    client = fake('{"a": 1}')
    reply = whole(client, tools=[TOOL] if with_tools else [], **fields)
    assert client.started[0].params.constraint is not None
    assert reply["content"] == [{"type": "text", "text": '{"a": 1}'}]


def test_what_clients_send_by_habit_is_taken() -> None:
    client = fake("ok")
    thought = {"type": "redacted_thinking", "data": "x"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
    whole(
        client,
        max_tokens=100_000,
        cache_control={"type": "ephemeral"},
        output_config={"effort": "high"},
        messages=[USER, said, {"role": "system", "content": "Be brief."}, USER],
    )
    (request,) = client.started
    assert request.params.max_tokens == 1024 - len(request.prompt_ids)
