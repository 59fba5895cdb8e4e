"""What coding agents and client libraries send besides text: tools of all kinds, edits of the
context, fields that label a request."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.http.parsers.json_reader import TextFieldReader
from tests.support.api_calls import CHAT, COMPLETIONS, USER, error_of, named_events, post
from tests.support.api_calls import call as send
from tests.support.fake_client import FakeEngineClient

RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/generate"
PATCH = '*** Begin Patch\n+"quoted" \\ back\n*** End Patch\n'


def fake(script: str = "ok") -> FakeEngineClient:
    client = FakeEngineClient(max_model_len=20_000, tool_format="hermes")
    client.script = script
    return client


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def body_of(path: str) -> dict[str, Any]:
    """The least that each route takes."""
    return {
        CHAT: {"messages": [USER]},
        COMPLETIONS: {"prompt": "hi"},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": [USER], "max_tokens": 8},
        GENERATE: {"text": "hi"},
    }[path]


LABELS: list[tuple[str, str, Any]] = [
    (RESPONSES, "client_metadata", {"thread_id": "x", "n": "1"}),
    (RESPONSES, "store", True),
    (RESPONSES, "truncation", "auto"),
    (RESPONSES, "access_programs", ["a"]),
    (RESPONSES, "prompt_cache_options", {"mode": "explicit"}),
    (RESPONSES, "stream_options", {"reasoning_summary_delivery": "sequential_cutoff"}),
    (RESPONSES, "include", ["reasoning.encrypted_content", "web_search_call.action.sources"]),
    (RESPONSES, "reasoning", {"effort": "ultra", "summary": "none", "context": "all_turns"}),
    (RESPONSES, "context_management", [{"type": "compaction", "compact_threshold": 1000}]),
    (CHAT, "store", True),
    (CHAT, "prompt_cache_options", {"mode": "explicit"}),
    (CHAT, "client_metadata", {"a": 1}),
    (CHAT, "reasoning_effort", "max"),
    (CHAT, "user", "u"),
    (COMPLETIONS, "store", False),
    (COMPLETIONS, "metadata", {"a": "b"}),
    (MESSAGES, "speed", "fast"),
    (MESSAGES, "diagnostics", {"previous_message_id": None}),
    (MESSAGES, "fallbacks", [{"model": "x"}]),
    (MESSAGES, "user_profile_id", "u"),
    (MESSAGES, "anthropic_version", "bedrock-2023-05-31"),
    (MESSAGES, "output_config", {"effort": "ultra", "task_budget": {"type": "tokens", "total": 9}}),
    (MESSAGES, "context_management", {"edits": []}),
]


@pytest.mark.parametrize(("path", "field", "value"), LABELS)
def test_a_field_that_cannot_change_the_output_is_accepted(
    path: str, field: str, value: Any
) -> None:
    plain = post(path, fake(), **body_of(path))
    labelled = post(path, fake(), **body_of(path), **{field: value})
    assert labelled.status_code == plain.status_code == 200, labelled.text
    streamed = post(path, fake(), **body_of(path), **{field: value}, stream=True)
    assert streamed.status_code == 200, streamed.text


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (RESPONSES, "conversation", "c"),
        (RESPONSES, "prompt", {"id": "p"}),
        (RESPONSES, "frobnicate", 1),
        (MESSAGES, "container", "c"),
        (MESSAGES, "mcp_servers", [{"url": "http://x"}]),
        (MESSAGES, "frobnicate", 1),
        (CHAT, "moderation", {"model": "m"}),
        (CHAT, "frobnicate", 1),
    ],
)
def test_a_field_that_could_change_it_is_refused_by_name(path: str, field: str, value: Any) -> None:
    reply = post(path, fake(), **body_of(path), **{field: value})
    assert reply.status_code == 400
    assert field in reply.json()["error"]["message"]


# --- tools ---------------------------------------------------------------------------------------

NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "note"},
    ],
}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files."}


def items_of(client: FakeEngineClient, **fields: Any) -> list[dict[str, Any]]:
    """The output of a response, which a stream must have, too."""
    reply = post(RESPONSES, client, input="hi", **fields)
    assert reply.status_code == 200, reply.text
    last = named_events(post(RESPONSES, client, input="hi", stream=True, **fields))[-1]["response"]
    kept = ("type", "name", "namespace", "arguments", "input", "content")
    found = [
        [{key: item[key] for key in kept if key in item} for item in output]
        for output in (reply.json()["output"], last["output"])
    ]
    assert found[0] == found[1]
    return found[0]


def test_the_functions_of_a_namespace_are_called_by_their_own_names() -> None:
    client = fake(call("crm__find", {"q": 1}))
    (item,) = items_of(client, tools=[NAMESPACE])
    assert item == {
        "type": "function_call", "name": "find", "namespace": "crm", "arguments": '{"q": 1}',
    }  # fmt: skip
    shown = [tool["function"]["name"] for tool in client.chat_calls[0]["tools"]]
    assert shown == ["crm__find", "crm__note"]
    (item,) = items_of(fake(call("crm__note", {"input": "a"})), tools=[NAMESPACE])
    assert item == {
        "type": "custom_tool_call", "name": "note", "namespace": "crm", "input": "a",
    }  # fmt: skip
    chosen = {"type": "function", "name": "find", "namespace": "crm"}
    (item,) = items_of(fake(call("crm__find", {})), tools=[NAMESPACE], tool_choice=chosen)
    assert item["name"] == "find"


def test_the_input_of_a_custom_tool_is_a_text() -> None:
    client = fake(call("apply_patch", {"input": PATCH}))
    assert items_of(client, tools=[CUSTOM]) == [
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH}
    ]
    chat = {"type": "custom", "custom": {"name": "apply_patch"}}
    body = {"messages": [USER], "tools": [chat]}
    message = post(CHAT, client, **body).json()["choices"][0]["message"]
    (made,) = message["tool_calls"]
    assert made["type"] == "custom"
    assert made["custom"] == {"name": "apply_patch", "input": PATCH}
    text, kinds = "", []
    for chunk in named_events(post(CHAT, client, **body, stream=True)):
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []):
            text += delta["custom"]["input"]
            kinds += [delta["type"]] if "type" in delta else []
    assert (text, kinds) == (PATCH, ["custom"])
    # What was called can be sent back, in both dialects.
    history = [USER, message, {"role": "tool", "tool_call_id": made["id"], "content": "done"}]
    assert post(CHAT, client, messages=history, tools=[chat]).status_code == 200
    function = client.chat_calls[-1]["messages"][1]["tool_calls"][0]["function"]
    assert function == {"name": "apply_patch", "arguments": {"input": PATCH}}
    items = [
        {"role": "user", "content": "hi"},
        {**CUSTOM, "type": "custom_tool_call", "call_id": "c", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    assert post(RESPONSES, client, input=items, tools=[CUSTOM]).status_code == 200
    assert client.chat_calls[-1]["messages"][1]["tool_calls"][0]["function"] == function


def test_a_grammar_of_a_custom_tool_is_enforced_and_shown() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
    client = fake(call("pick", {"input": "ab"}))
    items_of(client, tools=[{"type": "custom", "name": "pick", "format": regex}])
    assert '"pattern"' in client.checked[0].payload["value"]
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    tools = [{"type": "custom", "custom": {"name": "pick", "format": lark}}]
    client = fake(call("pick", {"input": "a"}))
    assert post(CHAT, client, messages=[USER], tools=tools).status_code == 200
    (made,) = json.loads(client.checked[0].payload["value"])["calls"]
    assert made["lark"] == 'start: "a"' and made["begin"].endswith('{"input": "')
    assert 'start: "a"' in client.chat_calls[-1]["tools"][0]["function"]["description"]


@given(st.text(), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_text_inputs_are_read_however_they_are_cut(
    text: str, cuts: list[int], is_ascii: bool
) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader, read, at = TextFieldReader("input"), "", 0
    for cut in [*sorted(cuts), len(written)]:
        read += reader.feed(written[at:cut])
        at = max(at, cut)
    assert read + reader.finish() == text


@given(st.text(alphabet='{}"\\: inputud83a', max_size=20), st.integers(0, 20))
def test_other_inputs_lose_nothing_and_never_fail(written: str, cut: int) -> None:
    whole, cut_reader = TextFieldReader("input"), TextFieldReader("input")
    first = whole.feed(written) + whole.finish()
    second = cut_reader.feed(written[:cut]) + cut_reader.feed(written[cut:]) + cut_reader.finish()
    assert first == second
    if not written.lstrip().startswith("{"):
        assert first == written
    first.encode()


HOSTED: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    (RESPONSES, [{"type": "web_search", "external_web_access": True}], ["web_search"]),
    (RESPONSES, [{"type": "local_shell"}, {"type": "mcp"}], ["local_shell", "mcp"]),
    (RESPONSES, [{"type": "tool_of_next_year", "any": [1]}], ["tool_of_next_year"]),
    (CHAT, [{"type": "web_search_preview"}], ["web_search_preview"]),
    (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}], ["web_search_20250305"]),
    (MESSAGES, [{"type": "bash_20250124", "name": "bash"}], ["bash_20250124"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "tools", "kinds"), HOSTED)
def test_a_hosted_tool_is_not_shown_and_the_reply_says_so(
    path: str, tools: list[dict[str, Any]], kinds: list[str]
) -> None:
    client = fake()
    reply = post(path, client, **body_of(path), tools=tools)
    assert reply.status_code == 200, reply.text
    assert reply.json()["ignored_tools"] == kinds
    assert client.chat_calls[0]["tools"] is None
    streamed = named_events(post(path, client, **body_of(path), tools=tools, stream=True))
    first = streamed[0].get("response") or streamed[0].get("message") or streamed[0]
    assert first["ignored_tools"] == kinds
    assert "ignored_tools" not in post(path, client, **body_of(path)).json()


def test_a_search_that_a_field_asks_for_is_a_hosted_tool() -> None:
    reply = post(CHAT, fake(), messages=[USER], web_search_options={"search_context_size": "low"})
    assert reply.json()["ignored_tools"] == ["web_search"]


def test_a_history_of_hosted_calls_reaches_the_template() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "q"}},
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        {"type": "additional_tools", "role": "developer", "tools": [CUSTOM]},
    ]
    client = fake()
    assert post(RESPONSES, client, input=items).status_code == 200
    (given,) = client.chat_calls
    user, assistant, output = given["messages"]
    assert user["role"] == "user"
    assert [each["function"] for each in assistant["tool_calls"]] == [
        {"name": "web_search", "arguments": {"action": {"query": "q"}}},
        {"name": "local_shell", "arguments": {"action": {"command": ["ls"]}}},
    ]
    assert output["tool_call_id"] == "c" and "a.txt" in output["content"]
    assert given["tools"][0]["function"]["name"] == "apply_patch"


def test_reasoning_of_earlier_turns_is_left_out_on_demand() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    items = [
        {"role": "user", "content": "a"}, thought("old"), {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, thought("new"),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
    ]  # fmt: skip
    for context, kept in (("auto", ["old", "new"]), ("current_turn", ["new"])):
        client = fake()
        reply = post(RESPONSES, client, input=items, reasoning={"context": context})
        assert reply.status_code == 200
        found = [m.get("reasoning_content") for m in client.chat_calls[0]["messages"]]
        assert [text for text in found if text] == kept


def test_blocks_of_other_servers_and_documents_reach_the_template() -> None:
    text = {"type": "text", "text": "passage"}
    found = [{"type": "web_search_result", "url": "http://x", "title": "t"}]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "compaction", "content": "what was before"},
                {
                    "type": "document",
                    "title": "Title",
                    "source": {"type": "text", "media_type": "text/plain", "data": "the data"},
                },
                {
                    "type": "search_result",
                    "source": "http://s",
                    "title": "found",
                    "content": [text],
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I search."},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"q": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found},
                {"type": "text", "text": "Found."},
            ],
        },
        {"role": "user", "content": "Thanks."},
    ]
    client = fake()
    reply = post(MESSAGES, client, messages=messages, max_tokens=8)
    assert reply.status_code == 200, reply.text
    user, calling, result, saying, _ = client.chat_calls[0]["messages"]
    for words in ("what was before", "Title", "the data", "http://s", "found", "passage"):
        assert words in user["content"]
    assert calling["content"] == "I search."
    assert calling["tool_calls"][0]["function"] == {"name": "web_search", "arguments": {"q": "x"}}
    assert result["tool_call_id"] == "s1" and "http://x" in result["content"]
    assert saying == {"role": "assistant", "content": "Found."}
    for source in ({"type": "base64", "data": ""}, {"type": "url", "url": "http://x"}):
        content = [{"type": "document", "source": source}]
        refused = post(MESSAGES, messages=[{"role": "user", "content": content}], max_tokens=8)
        assert refused.status_code == 400 and source["type"] in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{}", {}),
        ('{"a": tru}', {"INVALID_JSON": '{"a": tru}'}),
        ("{'a': 1}", {"INVALID_JSON": "{'a': 1}"}),
        ('{"a": 1,}', {"INVALID_JSON": '{"a": 1,}'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
        ("[1, 2]", {"INVALID_JSON": "[1, 2]"}),
    ],
)
def test_broken_arguments_are_not_an_empty_object(written: str, shown: dict[str, Any]) -> None:
    script = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"messages": [USER], "max_tokens": 300, "tools": [tool]}
    (block,) = post(MESSAGES, fake(script), **body).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", shown)
    streamed = named_events(post(MESSAGES, fake(script), **body, stream=True))
    deltas = [e["delta"] for e in streamed if e["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == written
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "no"}
    history = [
        USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    client = fake()
    assert post(MESSAGES, client, messages=history, max_tokens=3).status_code == 200
    (sent,) = client.chat_calls[0]["messages"][1]["tool_calls"]
    arguments = sent["function"]["arguments"]
    assert arguments == (shown if "INVALID_JSON" not in shown else written)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("", {}),
        ('{"a', {"INVALID_JSON": '{"a'}),
        ('{"a": tr', {"INVALID_JSON": '{"a": tr'}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ("[1, ", {"INVALID_JSON": "[1, "}),
    ],
)
@pytest.mark.parametrize("end", ["length", "stop"])
def test_arguments_that_were_cut_are_not_an_empty_object(
    written: str, shown: dict[str, Any], end: str
) -> None:
    script = f'<tool_call>\n{{"name": "f", "arguments": {written}'
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"messages": [USER], "max_tokens": len(script), "tools": [tool]}
    if end == "stop":
        script, body = f"{script}#", {**body, "stop_sequences": ["#"], "max_tokens": 300}
    reply = post(MESSAGES, fake(script), **body).json()
    (block,) = reply["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", shown)
    assert reply["stop_reason"] == {"length": "max_tokens", "stop": "stop_sequence"}[end]
    streamed = named_events(post(MESSAGES, fake(script), **body, stream=True))
    deltas = [e["delta"] for e in streamed if e["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == written
    reasons = [e["delta"]["stop_reason"] for e in streamed if e["type"] == "message_delta"]
    assert reasons == [reply["stop_reason"]]


# --- Anthropic's context_management and threads --------------------------------------------------


def history(calls: int = 5) -> list[dict[str, Any]]:
    """A conversation with reasoning, calls and results in two turns."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "first"}]
    for number in range(calls):
        if number == calls - 1:
            messages.append({"role": "user", "content": "second"})
        messages.append(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"thought {number}", "signature": ""},
                    {
                        "type": "tool_use",
                        "id": f"t{number}",
                        "name": "read",
                        "input": {"n": number},
                    },
                ],
            }
        )
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number}"}
        messages.append({"role": "user", "content": [result]})
    return messages


def edited(*edits: dict[str, Any], **fields: Any) -> tuple[FakeEngineClient, list[dict[str, Any]]]:
    client = fake()
    body = {"messages": history(), "max_tokens": 8, "context_management": {"edits": list(edits)}}
    reply = post(MESSAGES, client, **body, **fields)
    assert reply.status_code == 200, reply.text
    applied = reply.json()["context_management"]["applied_edits"]
    *_, delta, stop = named_events(post(MESSAGES, client, **body, **fields, stream=True))
    assert stop["type"] == "message_stop"
    assert delta["context_management"]["applied_edits"] == applied
    return client, applied


def thoughts(client: FakeEngineClient) -> list[str]:
    found = [m.get("reasoning_content") for m in client.chat_calls[-1]["messages"]]
    return [text for text in found if text]


def results(client: FakeEngineClient) -> list[str]:
    return [m["content"] for m in client.chat_calls[-1]["messages"] if m["role"] == "tool"]


def test_all_thinking_is_kept_as_claude_code_asks() -> None:
    client, applied = edited({"type": "clear_thinking_20251015", "keep": "all"})
    assert applied == [] and len(thoughts(client)) == 5


def test_old_thinking_is_cleared() -> None:
    client, applied = edited({"type": "clear_thinking_20251015"})
    assert thoughts(client) == ["thought 4"]
    (edit,) = applied
    assert edit["cleared_thinking_turns"] == 1 and edit["type"] == "clear_thinking_20251015"
    keep = {"type": "thinking_turns", "value": 2}
    client, applied = edited({"type": "clear_thinking_20251015", "keep": keep})
    assert applied == [] and len(thoughts(client)) == 5


def test_old_results_are_cleared() -> None:
    soon = {"type": "input_tokens", "value": 10}
    client, (edit,) = edited(
        {"type": "clear_tool_uses_20250919", "trigger": soon, "clear_tool_inputs": True}
    )
    assert [text.startswith("result") for text in results(client)] == [False, False] + [True] * 3
    assert edit["cleared_tool_uses"] == 2
    calls = [m["tool_calls"][0] for m in client.chat_calls[-1]["messages"] if "tool_calls" in m]
    assert [c["function"]["arguments"] for c in calls][:3] == [{}, {}, {"n": 2}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trigger": {"type": "tool_uses", "value": 5}},
        {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 5}},
        {"trigger": {"type": "tool_uses", "value": 1}, "exclude_tools": ["read"]},
        {
            "trigger": {"type": "tool_uses", "value": 1},
            "clear_at_least": {"type": "input_tokens", "value": 5000},
        },
    ],
)
def test_results_are_kept_where_the_edit_is_not_due(options: dict[str, Any]) -> None:
    client, applied = edited({"type": "clear_tool_uses_20250919", **options})
    assert applied == []
    assert results(client) == [f"result {number}" for number in range(5)]


def test_counting_has_the_numbers_before_and_after_the_edits() -> None:
    body = {"messages": history(), "max_tokens": 8}
    client = fake()
    edits = [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}]
    management = {"edits": edits}
    body.pop("max_tokens")
    plain = post(f"{MESSAGES}/count_tokens", client, **body).json()
    reply = post(f"{MESSAGES}/count_tokens", client, **body, context_management=management).json()
    assert reply["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    assert reply["input_tokens"] != plain["input_tokens"]


def test_a_compaction_that_is_due_is_refused_by_name() -> None:
    trigger = {"type": "input_tokens", "value": 3}
    edit = {"type": "compact_20260112", "trigger": trigger}
    body = body_of(MESSAGES) | {"context_management": {"edits": [edit]}}
    reply = post(MESSAGES, fake(), **body)
    assert reply.status_code == 400 and "context_management" in reply.json()["error"]["message"]
    edit["trigger"] = {"type": "input_tokens", "value": 3000}
    assert post(MESSAGES, fake(), **body).status_code == 200
    threshold = [{"type": "compaction", "compact_threshold": 3}]
    reply = post(RESPONSES, fake(), input="hi", context_management=threshold)
    assert error_of(reply)["param"] == "context_management"


def test_a_thread_is_refused_in_words_that_the_client_knows() -> None:
    reply = post(MESSAGES, fake(), **body_of(MESSAGES), thread={"type": "new"})
    assert reply.status_code == 400
    assert reply.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words() -> None:
    client = FakeEngineClient(max_model_len=20, tool_format="hermes")
    for text in ("x" * 40, "x" * 100_000):
        messages = [{"role": "user", "content": text}]
        reply = post(MESSAGES, client, messages=messages, max_tokens=8)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert message.startswith("prompt is too long: ") and message.endswith(" > 20 maximum")


def test_models_are_described_for_anthropics_client_too() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    model = call_http("GET", "/v1/models/fake", headers=headers).json()
    read = anthropic.types.ModelInfo.model_validate(model)
    assert (read.id, read.display_name, read.max_input_tokens) == ("fake", "fake", 256)
    listed = call_http("GET", "/v1/models").json()
    assert listed["data"] == [model] and listed["has_more"] is False
    error = call_http("GET", "/v1/models/x", headers=headers)
    assert error.status_code == 404 and error.json()["error"]["type"] == "not_found_error"


def call_http(method: str, path: str, **options: Any) -> httpx.Response:
    return send(FakeEngineClient(), method, path, **options)


def test_sglangs_names() -> None:
    reply = post(CHAT, fake("some words"), messages=[USER], stop=[" w"])
    choice = reply.json()["choices"][0]
    assert choice["matched_stop"] == choice["stop_reason"] == " w"
    *_, last = named_events(post(CHAT, fake("a b"), messages=[USER], stop=[" "], stream=True))
    assert last["choices"][0]["matched_stop"] == " "
    assert call_http("GET", "/server_info").json()["disable_radix_cache"] is False
