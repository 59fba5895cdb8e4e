"""A model that writes messages in channels, whose marks are special tokens: stops, formats and
messages that are continued."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tokenizer.loading import TokenizerFiles
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.api_calls import CHAT, USER, post
from tests.support.scripted_client import ScriptedClient
from tests.unit.tokenizer.tokenizer_kinds import byte_level

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"]
TEMPLATE = """\
{%- for message in messages %}
{{- '<|start|>' + message.role }}
{{- '<|channel|>final' if message.role == 'assistant' else '' }}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>One. Two.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def make_tokenizer() -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(MARKS)
    return Tokenizer(TokenizerFiles(backend, {"eos_token": "<|return|>"}, {"default": TEMPLATE}))


TOKENIZER = make_tokenizer()
TOOL = {"type": "function", "function": {"name": "f"}}


def message(script: str, **body: Any) -> dict[str, Any]:
    client = ScriptedClient(TOKENIZER, "gpt_oss", reasoning_format="gpt_oss")
    client.script = script
    reply = post(CHAT, client, **{"messages": [USER], **body})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    checked = client.checked[-1].payload["thinking"] if client.checked else None
    return choice["message"] | {"end": choice["finish_reason"], "checked": checked}


def test_stops_count_in_the_final_message() -> None:
    got = message(f"{THOUGHT}{FINAL}Three. Four", stop=["."])
    assert (got["reasoning"], got["content"], got["end"]) == ("One. Two.", "Three", "stop")
    got = message(f"{THOUGHT}{FINAL}Three final. Four", stop=["final", "assistant"])
    assert (got["reasoning"], got["content"]) == ("One. Two.", "Three ")
    call = '<|channel|>commentary to=functions.f<|message|>{"a": "."}'
    got = message(THOUGHT + call, stop=["."], tools=[TOOL])
    (made,) = got["tool_calls"]
    assert made["function"]["arguments"] == '{"a": "."}' and got["end"] == "tool_calls"


def test_an_output_that_is_cut_within_its_thought() -> None:
    head = "<|channel|>analysis<|message|>One."
    num_tokens = len(TOKENIZER.encode(head, add_special_tokens=False))
    got = message(THOUGHT, max_tokens=num_tokens)
    assert (got["reasoning"], got["content"]) == ("One.", None)
    assert got["end"] == "length"


@pytest.mark.parametrize(
    ("text", "script", "reasoning", "content"),
    [
        ("So", " it is. Yes", None, " it is"),
        ("So <|channel|>", " it is. Yes", None, " it is"),
    ],
)
def test_a_final_message_that_is_continued(
    text: str, script: str, reasoning: str | None, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    got = message(script, messages=messages, continue_final_message=True, stop=["."])
    assert (got.get("reasoning"), got["content"]) == (reasoning, content)


def test_formats_count_in_the_final_message() -> None:
    form = {"type": "json_object"}
    got = message(f"{THOUGHT}{FINAL}{{}}", response_format=form)
    assert got["content"] == "{}" and got["checked"]["answer"] == FINAL
    messages = [USER, {"role": "assistant", "content": "{"}]
    client = ScriptedClient(TOKENIZER, "gpt_oss", reasoning_format="gpt_oss")
    client.script = "}"
    reply = post(CHAT, client, messages=messages, continue_final_message=True, response_format=form)
    assert reply.json()["choices"][0]["message"]["content"] == "}"
    assert "thinking" not in client.checked[-1].payload
