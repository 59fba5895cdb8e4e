"""`/v1/responses`: fields, items, events and errors, over scripted outputs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import TypeAdapter

from deploy.http.openai.responses.replies import Response, ResponseEvent
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import Conversation
from tests.support.api_calls import error_of, post
from tests.support.fake_client import FakeEngineClient

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
OTHER = {"type": "function", "name": "g"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def fake(script: str | None = None, reasons: bool = False) -> FakeEngineClient:
    client = FakeEngineClient(1024, tool_format="hermes", reasons=reasons)
    client.script = script
    return client


def whole(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    reply = post(PATH, client, **{"input": "hi", "max_output_tokens": 300} | fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    Response.model_validate(body)
    return body


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, event in enumerate(reply.text.removesuffix("\n\n").split("\n\n")):
        *place, kind, data = event.split("\n")
        assert not place or place[0].endswith(f":{number + 1}")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == number
        TypeAdapter(ResponseEvent).validate_python(found[-1])
    return found


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client puts together from the events of a stream."""
    items: list[dict[str, Any]] = []
    has_part = is_open = False
    for event in events:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert not is_open and event["item"]["status"] == "in_progress"
            is_open, has_part = True, False
            items.append(event["item"])
            continue
        item = items[-1]
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            is_open = False
            continue
        assert is_open and event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert not has_part and not item["content"]
            has_part = True
            item["content"] = [event["part"]]
        elif kind == "content_part.done":
            assert item["content"] == [event["part"]]
        elif kind.startswith("function_call_arguments"):
            if kind.endswith("delta"):
                item["arguments"] += event["delta"]
            else:
                assert item["arguments"] == event["arguments"]
        else:
            name, _, step = kind.partition(".")
            (part,) = item["content"]
            assert part["type"] == name
            if step == "delta":
                part["text"] += event["delta"]
                if "logprobs" in part:
                    part["logprobs"] += event["logprobs"]
            else:
                assert part["text"] == event["text"]
    assert not is_open
    return items


def streamed(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    body = {"input": "hi", "max_output_tokens": 300, "stream": True} | fields
    created, in_progress, *middle, end = events_of(post(PATH, client, **body))
    assert created["type"] == "response.created" and created["response"]["status"] == "in_progress"
    assert in_progress["response"] == created["response"] and created["response"]["output"] == []
    response: dict[str, Any] = end["response"]
    assert end["type"] == f"response.{response['status']}"
    assert created["response"]["id"] == response["id"]
    assert put_together(middle) == response["output"]
    return response


def without_ids(value: Any) -> Any:
    """Without what differs between two runs."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {k: without_ids(v) for k, v in value.items() if k not in changing}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "script",
    [
        "",
        "Hello there.",
        CALL,
        f"Well.\n{CALL}\n{CALL_G}",
        f"<think>Hm.\nSo.</think>\n\n{CALL}",
        "<think>Hm.</think>Yes.",
        "<think>Hm.",
        f"{CALL}\nthen",
    ],
)
@pytest.mark.parametrize("max_output_tokens", [8, 300])
def test_a_stream_has_the_items_of_the_reply(script: str, max_output_tokens: int) -> None:
    fields: dict[str, Any] = {"tools": [TOOL, OTHER], "max_output_tokens": max_output_tokens}
    reply = whole(fake(script, reasons=True), **fields)
    assert without_ids(streamed(fake(script, reasons=True), **fields)) == without_ids(reply)
    cut = len(script) >= max_output_tokens
    assert reply["status"] == ("incomplete" if cut else "completed")
    details = {"reason": "max_output_tokens"} if cut else None
    assert reply["incomplete_details"] == details and reply["error"] is None
    assert reply["usage"]["output_tokens"] == min(max(len(script), 1), max_output_tokens)


def test_items() -> None:
    reply = whole(fake(f"<think>Hm.</think>Well.\n{CALL}", reasons=True), tools=[TOOL])
    thought, message, call = reply["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"] == [{"type": "output_text", "text": "Well.", "annotations": []}]
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert [item["id"].split("_")[0] for item in reply["output"]] == ["rs", "msg", "fc"]
    assert call["call_id"].startswith("call_") and reply["id"].startswith("resp_")
    usage = reply["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think>")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_logprobs_belong_to_their_text() -> None:
    for client in (fake("Hello."), fake("<think>Hm.</think>Hello.", reasons=True)):
        client.swallow_first = 2
        reply = whole(client, **LOGPROBS)
        logprobs = reply["output"][-1]["content"][0]["logprobs"]
        tokens = "".join(entry["token"] for entry in logprobs)
        assert tokens.endswith("Hello.") and len(logprobs[0]["top_logprobs"]) == 2
        again = streamed(client, **LOGPROBS)
        # A stream can't take back what came with the reasoning.
        assert again["output"][-1]["content"][0]["logprobs"][-5:] == logprobs[-5:]


def test_the_template_gets_the_conversation() -> None:
    client = fake("ok")
    rendered: list[Any] = []
    original = client.render_chat

    async def render(chat: Conversation) -> list[int]:
        rendered.append((chat.messages, msgspec.structs.asdict(chat)))
        return await original(chat)

    client.render_chat = render  # type: ignore[method-assign]
    whole(
        client,
        instructions="Be brief.",
        tools=[TOOL],
        reasoning={"effort": "high", "summary": "auto"},
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "2"}]},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
            {"role": "user", "content": "go on"},
        ],
    )  # fmt: skip
    messages, options = rendered[0]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}
        for name, function in (("c1", "f"), ("c2", "g"), ("c3", "f"))
    ]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "reasoning_content": "t",
            "content": "a",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "user", "content": "go on"},
    ]
    assert options["template_kwargs"] == {"reasoning_effort": "high"}
    assert options["tools"][0]["function"]["name"] == "f"


def test_input_tokens_are_those_of_the_response() -> None:
    body: dict[str, Any] = {"input": "hi", "instructions": "Be brief.", "tools": [TOOL]}
    reply = post(f"{PATH}/input_tokens", fake("ok"), **body)
    assert reply.json() == {
        "object": "response.input_tokens",
        "input_tokens": whole(fake("ok"), **body)["usage"]["input_tokens"],
    }


def test_a_reply_can_be_sent_back() -> None:
    reply = whole(fake(f"<think>Hm.</think>Well.\n{CALL}", reasons=True), tools=[TOOL])
    output = {
        "type": "function_call_output",
        "call_id": reply["output"][2]["call_id"],
        "output": "1",
    }
    again = [{"role": "user", "content": "hi"}, *reply["output"], output]
    assert whole(fake("ok"), tools=[TOOL], input=again)["output"][0]["content"][0]["text"] == "ok"


def test_fields_reach_the_engine_and_the_reply() -> None:
    client = fake("ok")
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 4, "stop": ["zz"], "priority": 2,
        "cache_salt": "s", "presence_penalty": 0.5, "metadata": {"a": "b"}, "user": "u",
        "tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL],
        "text": {"verbosity": "medium"}, "store": False, "truncation": "disabled",
        "parallel_tool_calls": False, "previous_response_id": None,
    }  # fmt: skip
    client.script = CALL
    reply = whole(client, **fields)
    (request,) = client.started
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 3, 4)
    assert (params.stop, params.presence_penalty, params.max_tokens) == (["zz"], 0.5, 300)
    assert (request.priority, request.namespace) == (2, "s") and params.constraint is not None
    for name in ("temperature", "top_p", "metadata", "user", "tool_choice", "parallel_tool_calls"):
        assert reply[name] == fields[name]
    assert reply["tools"] == [{**TOOL, "strict": False}] and reply["store"] is False


@pytest.mark.parametrize("with_tools", [False, True])
def test_an_answer_may_have_a_form(with_tools: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given in (
        {"type": "json_object"},
        {"type": "json_schema", "name": "x", "schema": schema, "strict": True},
    ):
        client = fake('{"a": 1}')
        reply = whole(client, text={"format": given}, tools=[TOOL] if with_tools else [])
        assert client.started[0].params.constraint is not None and len(client.checked) == 1
        assert reply["text"]["format"] == given
        assert reply["output"][0]["content"][0]["text"] == '{"a": 1}'


def test_some_of_the_tools_may_be_allowed() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    for mode in ("auto", "required"):
        client = fake(CALL_G)
        reply = whole(client, tools=[TOOL, OTHER], tool_choice={**choice, "mode": mode})
        assert reply["output"][0]["name"] == "g" and reply["tool_choice"]["mode"] == mode
        (spec,) = client.checked
        calls = json.loads(spec.payload["value"])["calls"]
        assert ["g" in call["begin"] for call in calls] == [True]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True, "store": False}, "background", "store"),
    ({"conversation": "c"}, "conversation", "not supported"),
    ({"truncation": "middle"}, "truncation", "'auto'"),
    ({"input": []}, "input", "empty"),
    ({"input": [{"role": "user", "content": ""}] * 2049}, "input", "2048"),
    ({"input": 4}, "input", "string or a list"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content", "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "[0].text", "provide"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "user"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "arguments", "provide"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL, TOOL]}, "tools", "same name"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice", "'x'"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "schema"),
    ({"text": {"verbosity": "some"}}, "text.verbosity", "'low'"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "context length"),
    ({"model": "other"}, "model", "does not exist"),
    ({"messages": []}, "messages", "Unrecognized"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_bad_input_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    reply = post(PATH, fake("ok"), **{"input": "hi"} | fields)
    error = error_of(reply)
    assert reply.status_code == (404 if "model" in fields else 400)
    assert error["param"].endswith(param) and words in error["message"], error


@pytest.mark.parametrize("at", [0, 3])
def test_a_stream_that_fails(at: int) -> None:
    client = fake("Hello there.")
    client.error_at = (at, RequestError("It broke.", status=500))
    reply = post(PATH, client, input="hi", stream=True)
    if at == 0:
        assert reply.status_code == 500 and error_of(reply)["message"] == "It broke."
        return
    *_, done, error, failed = events_of(reply)
    assert done["item"]["status"] == "incomplete" and done["item"]["content"][0]["text"] == "Hel"
    assert (error["type"], error["message"]) == ("error", "It broke.")
    response = failed["response"]
    assert (failed["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"]["message"] == "It broke." and response["output"] == [done["item"]]


@pytest.mark.parametrize("tier", ["flex", "auto", None])
def test_service_tier(tier: str | None) -> None:
    client = fake()
    assert whole(client, input="hi", service_tier=tier)["service_tier"] == tier
    assert [sequence.is_flex for sequence in client.started] == [tier == "flex"]
