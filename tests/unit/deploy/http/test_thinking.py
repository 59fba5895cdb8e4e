"""The thought is not the answer: stops, formats and prompts that end within a thought."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.http.generation.thinking import opens_thought
from tests.support.api_calls import CHAT, COMPLETIONS, USER, post
from tests.support.scripted_client import ScriptedClient
from tests.unit.tokenizer.chat_shapes import QWEN
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

TOKENIZER = make_tokenizer("byte_level", QWEN)
SCRIPT = "<think>One. Two.</think>\n\nThree. Four"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENED = "<|im_start|>assistant\n<think>\nLet me"


def model(script: str = SCRIPT) -> ScriptedClient:
    client = ScriptedClient(TOKENIZER, "hermes")
    client.script = script
    return client


def ask(client: ScriptedClient, path: str, **body: Any) -> dict[str, Any]:
    reply = post(path, client, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def message(client: ScriptedClient, **body: Any) -> dict[str, Any]:
    (choice,) = ask(client, CHAT, **{"messages": [USER], **body})["choices"]
    return choice["message"] | {"end": (choice["finish_reason"], choice["stop_reason"])}


def test_stops_of_chats() -> None:
    full_stop = TOKENIZER.encode(".", add_special_tokens=False)
    for stop in ({"stop": ["."]}, {"stop_token_ids": full_stop}):
        got = message(model(), **stop)
        assert (got["reasoning"], got["content"]) == ("One. Two.", "Three")
        assert got["end"] == ("stop", full_stop[0] if "stop_token_ids" in stop else ".")


def test_stops_of_responses_and_messages() -> None:
    reply = ask(model(), "/v1/responses", input="hi", stop=["."])
    thought, answer = reply["output"]
    assert thought["content"][0]["text"] == "One. Two."
    assert answer["content"][0]["text"] == "Three"
    assert [item["status"] for item in reply["output"]] == ["completed"] * 2
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 99, "stop_sequences": ["."]}
    reply = ask(model(), "/v1/messages", **body, thinking=thinking)
    assert [block.get("thinking") or block["text"] for block in reply["content"]] == [
        "One. Two.",
        "Three",
    ]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", ".")


def test_an_output_that_ends_within_its_thought() -> None:
    for stop in ({}, {"stop": ["."]}):
        reply = ask(model(), "/v1/responses", input="hi", max_output_tokens=6, **stop)
        assert reply["status"] == "incomplete"
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [(item["type"], item["status"]) for item in reply["output"]] == [
            ("reasoning", "incomplete")
        ]
    # The model ended it itself.
    reply = ask(model("<think>One."), "/v1/responses", input="hi", stop=["."])
    assert (reply["status"], reply["output"][0]["status"]) == ("completed", "incomplete")


def test_a_thought_that_is_complete_before_a_cut() -> None:
    num_tokens = len(TOKENIZER.encode("<think>One.</think>", add_special_tokens=False))
    client = model("<think>One.</think>Two")
    reply = ask(client, "/v1/responses", input="hi", max_output_tokens=num_tokens)
    assert (reply["status"], reply["output"][0]["status"]) == ("incomplete", "completed")


def prefilled(text: Any) -> dict[str, Any]:
    return {
        "messages": [USER, {"role": "assistant", "content": text}],
        "continue_final_message": True,
    }


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("<think>Let me", True),
        ("<think>\n", True),
        ([{"type": "text", "text": "<think>Let me"}], True),
        ("<think>Let me</think>So", False),
        ("So", False),
        ("The tag <think> begins", False),
    ],
)
def test_prefilled_thoughts_of_chats(text: Any, is_open: bool) -> None:
    client = model("One. Two.</think>Three. Four" if is_open else "One. Two")
    got = message(client, **prefilled(text), stop=["."])
    if is_open:
        assert (got["reasoning"], got["content"]) == ("One. Two.", "Three")
    else:
        assert (got["reasoning"], got["content"]) == (None, "One")
    message(client, **prefilled(text), response_format={"type": "json_object"})
    assert client.checked[-1].payload["thinking"]["is_open"] is is_open


def test_the_template_closes_no_thought_that_is_continued() -> None:
    client = model("</think>Yes")
    message(client, **prefilled("<think>Let me"))
    prompt = TOKENIZER.decode(client.started[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>Let me")


def test_prefilled_thoughts_of_messages() -> None:
    messages = [USER, {"role": "assistant", "content": "<think>Let me"}]
    client = model("One. Two.</think>Three. Four")
    body: dict[str, Any] = {"messages": messages, "max_tokens": 99, "stop_sequences": ["."]}
    (answer,) = ask(client, "/v1/messages", **body)["content"]
    assert answer["text"] == "Three"
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    ask(client, "/v1/messages", **body, output_config=output)
    assert client.checked[-1].payload["thinking"]["is_open"] is True


def test_a_tag_in_a_users_words_opens_nothing() -> None:
    for words in ("What is <think>?", "<think>", "a\n<think>Let me"):
        client = model("One. Two")
        got = message(client, messages=[{"role": "user", "content": words}], stop=["."])
        assert (got["reasoning"], got["content"]) == (None, "One")


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        (OPENED, True),
        ("<think>", True),
        ("Question: why?\nAnswer: <think>\n", True),
        ("<think>a</think>b<|im_end|>\n<|im_start|>assistant\n<think>c", True),
        ("[INST]a[/INST]<think>b", True),
        ("What does <think> mean?", False),
        (f"{OPENED}</think>", False),
        (f"{OPENED}<|im_end|>\n<|im_start|>user\n", False),
        ("Once", False),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_of_completions(prompt: str, is_open: bool, as_ids: bool) -> None:
    assert opens_thought(prompt) is is_open
    ids = TOKENIZER.encode(prompt, add_special_tokens=False)
    given: Any = ids if as_ids else prompt
    client = model("One. Two.</think>Three. Four")
    text = "One. Two.</think>Three" if is_open else "One"
    reply = ask(client, COMPLETIONS, prompt=given, stop=["."], max_tokens=99)
    assert reply["choices"][0]["text"] == text
    ask(client, COMPLETIONS, prompt=given, guided_json=SCHEMA, max_tokens=99)
    assert client.checked[-1].payload.get("thinking") == (
        {"start": "<think>", "end": "</think>", "is_open": True} if is_open else None
    )
    sampling: dict[str, Any] = {"max_new_tokens": 99, "stop": ["."]}
    name = "input_ids" if as_ids else "text"
    reply = ask(client, "/generate", **{name: given, "sampling_params": sampling})
    assert reply["text"] == text
    sampling = {"max_new_tokens": 99, "json_schema": json.dumps(SCHEMA)}
    ask(client, "/generate", **{name: given, "sampling_params": sampling})
    assert ("thinking" in client.checked[-1].payload) is is_open


def test_each_prompt_of_a_batch_for_itself() -> None:
    client = model("One. Two.</think>Three. Four")
    reply = ask(client, COMPLETIONS, prompt=[OPENED, "Once"], stop=["."], max_tokens=99)
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == ["One. Two.</think>Three", "One"]


def test_models_that_do_not_think() -> None:
    client = ScriptedClient(TOKENIZER, "hermes", reasons=False)
    client.script = "One. Two"
    reply = ask(client, COMPLETIONS, prompt=OPENED, stop=["."], max_tokens=99)
    assert reply["choices"][0]["text"] == "One"
    assert message(client, **prefilled("<think>Let me"), stop=["."])["content"] == "One"
