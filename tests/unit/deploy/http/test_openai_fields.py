"""Fields that vLLM's clients know, from the request to the engine and back, over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api_calls import CHAT, COMPLETIONS, USER, chat, complete, events, post
from tests.support.fake_client import BOS, FakeEngineClient, expected_ids, expected_text


def prompt_of(path: str) -> dict[str, Any]:
    return {"prompt": "abc"} if path == COMPLETIONS else {"messages": [USER]}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [ord("d"), ord("e")]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [ord("d"), ord("e")]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [BOS, ord("a")]),
        ({"truncate_prompt_tokens": 50}, [BOS, *b"abcde"]),
        ({"truncate_prompt_tokens": -1}, [BOS, *b"abcde"]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 253}, [*b"cde"]),
    ],
)
def test_prompts_are_truncated(fields: dict[str, Any], kept: list[int]) -> None:
    client = FakeEngineClient()
    body = complete(client, prompt="abcde", return_token_ids=True, **fields)
    assert client.started[0].prompt_ids == kept
    assert body["choices"][0]["prompt_token_ids"] == kept
    assert body["usage"]["prompt_tokens"] == len(kept)


def test_a_prompt_of_any_length_can_be_truncated() -> None:
    client = FakeEngineClient()
    complete(client, prompt="a" * 100_000 + "b", truncate_prompt_tokens=3)
    assert client.started[0].prompt_ids == [*b"aab"]
    echoed = complete(client, prompt="abcdef", truncate_prompt_tokens=2, echo=True, logprobs=0)
    assert echoed["choices"][0]["text"] == "ef" + expected_text(5, 4)
    assert echoed["choices"][0]["logprobs"]["tokens"][:2] == ["e", "f"]


def test_chats_are_truncated() -> None:
    client = FakeEngineClient()
    chat(client, truncate_prompt_tokens=2)
    assert client.started[0].prompt_ids == [*b"hi"]


def test_limits_of_the_output_reach_the_engine() -> None:
    client = FakeEngineClient()
    complete(
        client,
        allowed_token_ids=[1, 2],
        bad_words=["no", " yes", "no"],
        spaces_between_special_tokens=False,
        logprobs=0,
        logprob_token_ids=[7],
    )
    params = client.started[0].params
    assert params.allowed_token_ids == [1, 2]
    assert params.bad_words_ids == [[*b"no"], [*b"yes"], [*b" no"], [*b" yes"]]
    assert params.spaces_between_special_tokens is False
    assert params.logprob_token_ids == [7]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tokens_are_named_by_their_ids(path: str) -> None:
    wants = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    body = post(
        path, **prompt_of(path), seed=5, max_tokens=2, return_tokens_as_token_ids=True, **wants
    ).json()
    found = body["choices"][0]["logprobs"]
    names = [f"token_id:{token}" for token in expected_ids(5, 2)]
    if path == COMPLETIONS:
        assert found["tokens"] == names
        assert [list(top) for top in found["top_logprobs"]] == [[name] for name in names]
    else:
        assert [entry["token"] for entry in found["content"]] == names
        assert [entry["top_logprobs"][0]["token"] for entry in found["content"]] == names


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_stream_interval_sends_the_first_and_the_last_at_once(path: str, n: int) -> None:
    fields = {"seed": 5, "max_tokens": 8, "stream_interval": 3, "n": n, "return_token_ids": True}
    chunks = events(post(path, **prompt_of(path), stream=True, **fields))
    for index in range(n):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        sizes = [len(c["token_ids"]) for c in mine if c.get("token_ids")]
        assert sizes == [1, 3, 3, 1]
        texts = [c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in mine]
        assert "".join(texts) == expected_text(5 + index, 8)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_hold_the_prompts_logprobs_once(path: str) -> None:
    fields = {"seed": 5, "max_tokens": 3, "prompt_logprobs": 1, "n": 2}
    whole = post(path, **prompt_of(path), **fields).json()
    chunks = events(post(path, **prompt_of(path), stream=True, **fields))
    if path == CHAT:
        assert whole["prompt_logprobs"]
        assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
        assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])
        return
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert all("prompt_logprobs" not in c for c in mine[1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt_logprobs", [None, 0, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_everything(
    stream: bool, logprobs: int | None, n: int, prompt_logprobs: int | None, max_tokens: int
) -> None:
    fields = {
        "prompt": ["abc", "de"],
        "seed": 5,
        "echo": True,
        "n": n,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    if not stream:
        choices = post(COMPLETIONS, **fields).json()["choices"]
        pieces = [[choice] for choice in choices]
    else:
        chunks = events(post(COMPLETIONS, **fields, stream=True))
        flat = [c for chunk in chunks for c in chunk["choices"]]
        pieces = [[c for c in flat if c["index"] == index] for index in range(2 * n)]
    for index, mine in enumerate(pieces):
        prompt = "abc" if index < n else "de"
        text = prompt + expected_text(5 + index % n, max_tokens)
        assert "".join(c["text"] for c in mine) == text
        if logprobs is None:
            assert all(c["logprobs"] is None for c in mine)
        else:
            found = [c["logprobs"] for c in mine if c["logprobs"]]
            tokens = [token for part in found for token in part["tokens"]]
            assert tokens == ["<s>", *text]
            offsets = [offset for part in found for offset in part["text_offset"]]
            assert offsets == [0, *range(len(text))]
        given = mine[0].get("prompt_logprobs")
        assert (given is None) == (prompt_logprobs is None)
        if given is not None:
            assert len(given) == len(prompt) + 1
            assert len(given[1]) >= max(prompt_logprobs or 0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_echoes_the_message_that_it_continues(stream: bool) -> None:
    conversation = [USER, {"role": "assistant", "content": "I am"}]
    fields = {"messages": conversation, "continue_final_message": True, "echo": True}
    fields |= {"seed": 5, "max_tokens": 3}
    if stream:
        chunks = events(post(CHAT, **fields, stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in deltas) == "I am" + expected_text(5, 3)
    else:
        content = post(CHAT, **fields).json()["choices"][0]["message"]["content"]
        assert content == "I am" + expected_text(5, 3)
    assert chat(echo=True)["choices"][0]["message"]["content"] == expected_text(5, 4)


def test_usage_is_everywhere_if_only_continuous_usage_is_asked_for() -> None:
    options = {"continuous_usage_stats": True}
    client = FakeEngineClient()
    client.num_cached = 2
    reply = post(CHAT, client, messages=[USER], max_tokens=2, stream=True, stream_options=options)
    usages = [chunk["usage"] for chunk in events(reply)]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 2, 2]
    assert all(usage["prompt_tokens_details"] == {"cached_tokens": 2} for usage in usages)
