"""`/tokenize`, `/detokenize` and `/ping`, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_calls import USER, call, error_of, post
from tests.support.fake_client import BOS, FakeEngineClient


def test_a_text() -> None:
    reply = post("/tokenize", prompt="ab")
    assert reply.status_code == 200
    tokens = [BOS, 97, 98]
    assert reply.json() == {"count": 3, "max_model_len": 256, "tokens": tokens, "token_strs": None}
    reply = post("/tokenize", prompt="ab", add_special_tokens=False, return_token_strs=True)
    assert reply.json()["token_strs"] == ["a", "b"]


def test_a_conversation_has_the_ids_of_its_prompt() -> None:
    client = FakeEngineClient(tool_format="hermes")
    tool = {"type": "function", "function": {"name": "f"}}
    fields: dict[str, Any] = {"messages": [USER], "tools": [tool]}
    ids = post("/tokenize", client, **fields, chat_template_kwargs={"x": 1}).json()["tokens"]
    post("/v1/chat/completions", client, **fields, max_tokens=1, chat_template_kwargs={"x": 1})
    assert ids == client.started[0].prompt_ids
    for asked in client.chat_calls:  # what is told of the time
        asked.pop("now")
    assert client.chat_calls[0] == client.chat_calls[1]


def test_back_to_text() -> None:
    assert post("/detokenize", tokens=[BOS, 97, 98]).json() == {"prompt": "<s>ab"}
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 70_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "frobnicate": 1}, 400, "frobnicate"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_bad_input_is_named(path: str, body: dict[str, Any], status: int, param: str) -> None:
    reply = post(path, **body)
    assert (reply.status_code, error_of(reply)["param"]) == (status, param)


def test_other_bodies_are_refused() -> None:
    client = FakeEngineClient()
    assert call(client, "POST", "/tokenize", content=b"{}").status_code == 415
    json = {"Content-Type": "application/json"}
    assert call(client, "POST", "/tokenize", content=b"{", headers=json).status_code == 400
    assert call(client, "GET", "/tokenize").status_code == 405


def test_ping_says_whether_requests_can_be_served() -> None:
    client = FakeEngineClient()
    assert call(client, "GET", "/ping").status_code == 200
    client.is_healthy = False
    assert call(client, "GET", "/ping").status_code == 503
