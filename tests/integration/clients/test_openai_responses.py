"""`/v1/responses`, with the official `openai` client against a live server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from tests.support.random_schemas import check_json

MODEL = "manta-small"
ASK = "What does os.path.join do?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": PARAMETERS,
    "strict": True,
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time", "strict": False, "parameters": {}}


def respond(client: openai.OpenAI, **fields: Any) -> Response:
    options = {"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 6}
    return client.responses.create(**(options | fields))  # type: ignore[no-any-return]


def chat_text(client: openai.OpenAI, messages: list[Any], tokens: int = 6) -> str | None:
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=tokens
    )
    return reply.choices[0].message.content


def test_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    response = respond(client)
    assert response.output_text == chat_text(client, [{"role": "user", "content": ASK}])
    assert response.usage and response.usage.output_tokens == 6
    assert response.status == "incomplete" and response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert item.type == "message" and item.status == "incomplete"


def test_instructions_and_items_are_a_conversation(client: openai.OpenAI) -> None:
    first = respond(client, instructions="Be brief.")
    said: list[Any] = [{"role": "user", "content": ASK}]
    later = [
        *said,
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "So?"},
    ]
    again = respond(client, instructions="Be brief.", input=later)
    chat = [
        {"role": "system", "content": "Be brief."},
        *said,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "So?"},
    ]
    assert again.output_text == chat_text(client, chat)


def test_a_stream(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete" and text == whole.output_text
    assert last.response.output_text == text and last.response.usage and whole.usage
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_stream(client: openai.OpenAI) -> None:
    # This client's helper wants a response that isn't cut off.
    stop: Any = {"extra_body": {"stop": ["."], "seed": 3}}
    with client.responses.stream(model=MODEL, input=ASK, temperature=0, **stop) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text and final.status == "completed"


def test_the_async_client(url: str) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(
                model=MODEL, input=ASK, max_output_tokens=6, stream=True
            )
            return [event.type async for event in stream]

    kinds = asyncio.run(run())
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.incomplete", "response.completed")


class City(BaseModel):
    name: str
    size: int


def test_parse(client: openai.OpenAI) -> None:
    for seed in range(3):
        response = client.responses.parse(
            model=MODEL,
            input="A city, please.",
            text_format=City,
            extra_body={"seed": seed},
            max_output_tokens=400,
        )
        if response.status == "completed":
            assert isinstance(response.output_parsed, City)


def test_json_schema_and_json_object(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "name": "weather", "schema": PARAMETERS}
    response = respond(client, text={"format": schema}, max_output_tokens=200)
    check_json(response.output_text, PARAMETERS)
    response = respond(client, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    fields: dict[str, Any] = {
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "extra_body": {"seed": seed},
        "temperature": 1,
        "max_output_tokens": 400,
    }
    response = respond(client, **fields)
    (call,) = response.output
    assert call.type == "function_call" and call.name == "get_weather"
    check_json(call.arguments, PARAMETERS)
    events: list[Any] = list(respond(client, stream=True, **fields))
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done.arguments == call.arguments


def test_the_result_of_a_call_goes_back(client: openai.OpenAI) -> None:
    tools = {"tools": [WEATHER], "max_output_tokens": 300}
    said: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    first = respond(client, input=said, tool_choice="required", parallel_tool_calls=False, **tools)
    (call,) = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    second = respond(client, input=[*said, call.model_dump(), result], **tools)
    assert second.output and second.usage and first.usage
    assert second.usage.input_tokens > first.usage.input_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = respond(client, max_output_tokens=4, **fields)
    (item,) = response.output
    assert item.type == "message" and item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs
    assert logprobs and len(logprobs) == 4 and len(logprobs[0].top_logprobs) == 2
    assert "".join(entry.token for entry in logprobs) == response.output_text


def test_a_conversation_is_kept(client: openai.OpenAI) -> None:
    first = respond(client)
    again = client.responses.retrieve(first.id)
    assert again == first and again.store
    second = respond(client, input="And then?", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == chat_text(client, messages)
    *_, end = respond(client, input="More.", previous_response_id=second.id, stream=True)
    third = end.response
    assert client.responses.retrieve(third.id) == third
    (item,) = client.responses.input_items.list(third.id).data
    assert item.type == "message" and item.content[0].type == "input_text"
    assert item.content[0].text == "More."
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.NotFoundError):
        respond(client, previous_response_id=second.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(third.id)


def test_in_the_background(client: openai.OpenAI) -> None:
    goes_on = {"ignore_eos": True}
    want = respond(client, max_output_tokens=40, extra_body=goes_on)
    made = respond(client, max_output_tokens=40, background=True, extra_body=goes_on)
    assert made.status == "queued" and made.background
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (found.status, found.output_text) == ("incomplete", want.output_text)
    events = list(client.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=10))
    assert rest[:-1] == events[11:-1] and rest[-1].response.output_text == want.output_text
    slow = respond(client, max_output_tokens=900, background=True, extra_body=goes_on)
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="ended"):
        client.responses.cancel(made.id)


def test_what_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background") as refused:
        respond(client, background=True, store=False)
    assert refused.value.param == "background"
    bad = {"type": "json_schema", "name": "x", "schema": {"type": "no"}}
    with pytest.raises(openai.BadRequestError, match="no") as refused:
        respond(client, text={"format": bad})
    assert refused.value.param == "text.format"
    with pytest.raises(openai.NotFoundError):
        respond(client, model="gpt-5")
