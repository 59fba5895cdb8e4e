"""The official `anthropic` client against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.random_schemas import check_json

MODEL = "manta-small"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "Of a city.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as running:
        yield running


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**options(**fields))


def options(**fields: Any) -> dict[str, Any]:
    """Arguments of the client's methods, greedy; its newest version lacks `temperature`."""
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 24}
    return asked | {"extra_body": {"temperature": 0}} | fields


def test_models(claude: anthropic.Anthropic) -> None:
    model = claude.models.retrieve(MODEL)
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert model.max_input_tokens == 4096 and model.created_at.year >= 2024
    assert [each.id for each in claude.models.list()] == [MODEL]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.models.retrieve("claude")


def test_the_tool_runner_goes_on_without_threads(claude: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "London"], unit: Literal["C", "F"]) -> str:
        """The weather of a city."""
        return f"21 {unit} in {city}"

    runner = claude.beta.messages.tool_runner(
        model=MODEL,
        messages=ASK,
        max_tokens=64,
        tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
        max_iterations=2,
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        betas=["context-management-2025-06-27"],
    )
    first, second = list(runner)
    assert first.stop_reason == second.stop_reason == "tool_use"
    assert second.context_management is not None
    assert second.context_management.applied_edits == []


def test_a_message_has_the_text_of_a_chat(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    got = create(claude, system="Be brief.")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *ASK]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0
    )
    (block,) = got.content
    assert block.text == chat.choices[0].message.content
    assert chat.usage is not None
    assert got.usage.output_tokens == chat.usage.completion_tokens
    num_prompt = got.usage.input_tokens + got.usage.cache_read_input_tokens
    assert num_prompt == chat.usage.prompt_tokens
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    assert got.stop_reason == reasons[chat.choices[0].finish_reason]


def test_a_stream_is_the_message(claude: anthropic.Anthropic) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 300}):
        whole = create(claude, **fields)
        with claude.messages.stream(**options(**fields)) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"message_start", "content_block_delta", "message_stop"} <= kinds
        assert [b.model_dump(exclude={"id"}) for b in final.content] == [
            b.model_dump(exclude={"id"}) for b in whole.content
        ]
        assert final.stop_reason == whole.stop_reason
        assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_tool_is_called_and_its_result_goes_back(claude: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    first = create(claude, tools=[TOOL], tool_choice=choice, max_tokens=300)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.name == "get_weather" and call.id.startswith("toolu_")
    check_json(json.dumps(call.input), SCHEMA)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = create(claude, messages=messages, tools=[TOOL])
    assert second.content[0].type == "text" and second.content[0].text


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    free = create(claude).content[0].text
    word = free.split()[2]
    got = create(claude, stop_sequences=[word])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", word)
    assert free.startswith(got.content[0].text) and word not in got.content[0].text


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_large: bool


def test_parse(claude: anthropic.Anthropic) -> None:
    parsed = claude.messages.parse(model=MODEL, messages=ASK, output_format=City, max_tokens=8192)
    assert isinstance(parsed.parsed_output, City)


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "tools": [TOOL]}
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK, **fields)
    usage = create(claude, max_tokens=1, **fields).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_async_client_runs_many_at_once(url: str) -> None:
    async def run() -> list[Any]:
        base = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as client:
            options: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 8}
            return await asyncio.gather(*(client.messages.create(**options) for _ in range(16)))

    assert all(message.usage.output_tokens > 0 for message in asyncio.run(run()))


def test_errors_are_the_clients_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(claude, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError):
        create(claude, model="other")
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        create(claude, messages=[{"role": "user", "content": [image]}])
