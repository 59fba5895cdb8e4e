"""Tools of chats, with the official `openai` client against a live server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from tests.support.random_schemas import check_json
from tests.support.random_tools import check_random_tools

MODEL = "manta-small"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "London"]},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    options = {"model": MODEL, "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 400}
    return client.chat.completions.create(**(options | fields)).choices[0]


def check_call(call: Any, tools: list[dict[str, Any]]) -> None:
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    assert call.type == "function" and call.id.startswith("call_")
    check_json(call.function.arguments, functions[call.function.name]["parameters"])


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_follow_their_schemas(client: openai.OpenAI, seed: int) -> None:
    choice = chat(client, tool_choice="required", seed=seed)
    assert choice.message.content is None
    calls = choice.message.tool_calls
    assert calls
    if choice.finish_reason == "length":  # nothing keeps it from calling again
        calls = calls[:-1]
    else:
        assert choice.finish_reason == "tool_calls"
    for call in calls:
        check_call(call, [WEATHER, TIME])


def test_parallel_calls_can_be_switched_off(client: openai.OpenAI) -> None:
    several = [
        len(chat(client, tool_choice="required", seed=seed).message.tool_calls) for seed in range(8)
    ]
    assert max(several) > 1
    for seed in range(8):
        choice = chat(client, tool_choice="required", seed=seed, parallel_tool_calls=False)
        assert len(choice.message.tool_calls) == 1


def test_a_named_function_is_called_once(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = chat(client, tool_choice=named, temperature=0)
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    check_call(call, [WEATHER])


def test_streamed_calls_equal_whole_ones(client: openai.OpenAI) -> None:
    for seed in range(4):
        fields: dict[str, Any] = {"tool_choice": "required", "seed": seed}
        whole = chat(client, **fields).message.tool_calls
        options: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 400}
        tools: Any = [WEATHER, TIME]
        with client.chat.completions.stream(**options, tools=tools, **fields) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason in ("tool_calls", "length")
        got = final.message.tool_calls or []
        assert [c.function.arguments for c in got] == [c.function.arguments for c in whole]
        assert [c.function.name for c in got] == [c.function.name for c in whole]
        assert len({call.id for call in got}) == len(got)


def test_auto_answers_with_text(client: openai.OpenAI) -> None:
    """The small model never calls by itself; what it writes comes through."""
    with_tools = chat(client, temperature=0, max_tokens=30)
    assert with_tools.message.tool_calls == [] or with_tools.message.tool_calls is None
    assert with_tools.message.content and with_tools.finish_reason in ("stop", "length")
    none = chat(client, temperature=0, max_tokens=30, tool_choice="none")
    assert none.message.content == with_tools.message.content


def test_auto_with_strict_tools_and_an_answers_schema(client: openai.OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer}}
    kinds = set()
    for seed in range(12):
        choice = chat(client, tools=[strict], response_format=form, seed=seed)
        kinds.add(choice.finish_reason)
        for call in choice.message.tool_calls or []:
            check_call(call, [WEATHER])
        if choice.finish_reason == "stop":
            check_json(choice.message.content, answer)
    assert kinds >= {"stop"}
    free = chat(client, tools=[strict], temperature=0, max_tokens=30)
    assert free.message.content


def test_parse_gives_the_arguments_as_a_model(client: openai.OpenAI) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    tool = pydantic_function_tool(Weather, name="weather")
    tool["function"]["parameters"]["properties"]["city"]["maxLength"] = 20  # type: ignore[index]
    reply = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
        temperature=0,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_conversation_goes_on_with_the_result(client: openai.OpenAI) -> None:
    first = chat(client, tool_choice="required", temperature=0, parallel_tool_calls=False)
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
        for call in first.message.tool_calls
    ]
    messages = [*ASK, first.message.model_dump(exclude_none=True), *results]
    second = chat(client, messages=messages, temperature=0, max_tokens=20)
    assert second.message.content


def test_logprobs_and_n_work_beside_calls(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        n=3,
        seed=1,
        max_tokens=400,
        logprobs=True,
        stream_options=openai.omit,
    )
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.logprobs is not None
        written = "".join(entry.token for entry in choice.logprobs.content or [])
        for call in choice.message.tool_calls or []:
            assert call.type == "function" and call.function.arguments in written


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{**TIME, "type": "custom"}]}, "tools[0].custom"),
        ({"functions": [TIME["function"]]}, "functions"),
        ({"extra_body": {"guided_regex": "a"}, "tool_choice": "required"}, "guided_regex"),
    ],
)
def test_what_does_not_fit_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.param == param


def test_a_hostile_schema_fails_its_request_alone(client: openai.OpenAI) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    bad = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[bad], tool_choice="required")
    assert caught.value.param == "tools"
    assert chat(client, max_tokens=4).message.content


def test_calls_of_random_tools_validate(url: str) -> None:
    """40 sets of tools; tests/extended has 300."""
    check_random_tools(url, 40)
