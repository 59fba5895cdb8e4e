"""Requests from bytes to checked objects, and the pieces of replies that need no server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from deploy.http.body import encode_json, parse_request
from deploy.http.generation.plan import plan_texts, resolve_max_tokens
from deploy.http.generation.request import FieldNames, Incoming
from deploy.http.metrics import RequestTracker, ServerMetrics
from deploy.http.openai.chat import ChatCompletionRequest
from deploy.http.openai.completions import CompletionRequest, translate
from deploy.http.openai.logprobs import (
    LogprobStyle,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from deploy.http.openai.sse import ChunkEncoder
from deploy.options import ServerOptions
from engine.errors import RequestError
from engine.protocol.sampling_params import check_prompt
from engine.protocol.tokenizer_messages import LogprobEntry
from engine.tokenizer.tokenizer import normalize_message
from tests.support.fake_client import FakeEngineClient
from tests.support.model_info import model_info

USER = {"role": "user", "content": "hi"}
INFO = model_info("m", max_model_len=100, vocab_size=50)


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(json.dumps({"messages": [USER], **fields}).encode(), ChatCompletionRequest)


def refused(body: bytes, kind: type[Any] = CompletionRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_request(body, kind)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "normalized"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([0], [[0]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms_become_a_list_of_prompts(prompt: Any, normalized: Any) -> None:
    assert completion(prompt=prompt).prompt == normalized


def test_null_means_not_given() -> None:
    fields = ["temperature", "n", "stop", "logit_bias", "seed", "stream", "tools", "max_tokens"]
    for name in fields:
        kind = chat if name == "tools" else completion
        assert kind(**{name: None}) == kind()
    assert "stream_options" not in completion(stream_options=None).model_fields_set


def test_values_that_switch_an_unsupported_field_off_pass() -> None:
    chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        store=False,
    )
    completion(suffix="", best_of=2, n=2, length_penalty=1.0)


def test_labels_pass() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
    )


def test_one_and_true_are_not_mixed_up_in_unsupported_fields() -> None:
    assert refused(b'{"prompt": "x", "use_beam_search": 0}').param == "use_beam_search"


def test_an_earlier_reply_can_be_sent_back() -> None:
    # What openai's client gives by message.model_dump().
    reply = {
        "content": "hello",
        "refusal": None,
        "role": "assistant",
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    request = chat(messages=[USER, reply, USER])
    assert request.messages[1].as_template_input() == {"role": "assistant", "content": "hello"}


def test_calls_and_their_results_reach_the_template_and_unknown_keys_do_not() -> None:
    function = {"name": "add", "arguments": '{"a": 1}', "parsed": 1}
    call = {"id": "c1", "type": "function", "function": function, "index": 0}
    parts = [{"type": "text", "text": "2", "cache_control": {"type": "ephemeral"}}]
    request = chat(
        messages=[
            {**USER, "weight": 1},
            {"role": "assistant", "content": None, "tool_calls": [call], "parsed": None},
            {"role": "tool", "tool_call_id": "c1", "content": parts},
        ]
    )
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert [message.as_template_input() for message in request.messages] == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "content": [{"type": "text", "text": "2"}],
            "tool_call_id": "c1",
        },
    ]


def test_text_parts_are_joined_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts, "name": "n"}, USER])
    first = request.messages[0].as_template_input()
    assert normalize_message(first) == {"role": "system", "content": "a\nb", "name": "n"}
    assert request.messages[0].text == "ab"


def test_logit_bias_takes_string_keys_and_sampling_params_get_every_field() -> None:
    request = completion(
        logit_bias={"5": 1, "7": -100.0},
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        stop="s",
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logprobs=2,
        logprob_token_ids=[8, 9],
        allowed_token_ids=[1, 2],
        n=2,
        seed=11,
    )
    params = request.sampling_params(2, 3, {"temperature": 0.1, "top_p": 0.2})
    params.verify(50)
    got = {name: getattr(params, name) for name in params.__struct_fields__}
    assert got == {
        "n": 2,
        "constraint": None,
        "thinking": None,
        "max_tokens": None,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 1.0, 7: -100.0},
        "stop": ["s"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,  # listed tokens take the place of the likeliest
        "prompt_logprobs": 3,
        "logprob_token_ids": [8, 9],
        "allowed_token_ids": [1, 2],
        "bad_words_ids": [],
    }


def test_the_models_defaults_stand_in_for_fields_left_out() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    params = completion(top_k=-1).sampling_params(None, None, defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, -1, 1.0)
    assert completion(temperature=None).sampling_params(None, None, defaults).temperature == 0.6


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"[1]", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"prompt": "x"', "line 1, column 15"),
        (b'{"prompt": "x",\n "n" 2}', "line 2, column 6"),
        (b'{"prompt": "x"} x', "line 1, column 17"),
        (b'{"prompt": "\xff"}', "UTF-8 at byte 12"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 6000 + b"}", "too many digits"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
    ],
)
def test_broken_json_says_where(body: bytes, words: str) -> None:
    error = refused(body)
    assert words in error.message
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "top_p": Infinity}', "top_p"),
        (b'{"prompt": "x", "min_p": -Infinity}', "min_p"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": [1, NaN]}', "prompt[1]"),
        (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias.5"),
    ],
)
def test_numbers_that_are_not_finite_name_the_field(body: bytes, param: str) -> None:
    assert refused(body).param == param


def test_error_of_an_unknown_field_is_openais() -> None:
    error = refused(b'{"prompt": "x", "temprature": 1}')
    assert error.message == "Unrecognized request argument supplied: temprature"
    assert error.param == "temprature"


def test_error_paths_reach_into_messages() -> None:
    body = {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": 3}]}]}
    assert refused(json.dumps(body).encode(), ChatCompletionRequest).param.startswith(  # type: ignore[union-attr]
        "messages[1].content"
    )
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    error = refused(json.dumps(body).encode(), ChatCompletionRequest)
    assert (error.param, "not supported yet" in error.message) == ("messages[0].content", True)
    body = {"messages": [{**USER, "tool_calls": [{}]}]}
    assert refused(json.dumps(body).encode(), ChatCompletionRequest).param == (
        "messages[0].tool_calls[0].function"
    )


def test_context_limits() -> None:
    names = FieldNames("prompt", "max_tokens")
    assert resolve_max_tokens(90, None, None, INFO, names) == 10
    assert resolve_max_tokens(90, None, 16, INFO, names) == 10
    assert resolve_max_tokens(10, None, 16, INFO, names) == 16
    assert resolve_max_tokens(90, 10, None, INFO, names) == 10
    for prompt, asked, param in [(100, None, "prompt"), (100, 1, "prompt"), (90, 11, "max_tokens")]:
        with pytest.raises(RequestError) as caught:
            resolve_max_tokens(prompt, asked, None, INFO, names)
        assert caught.value.param == param
        assert caught.value.code == "context_length_exceeded"
        assert "100 tokens" in caught.value.message


def test_token_ids_at_the_edges() -> None:
    check_prompt([0, 49], INFO.resolved.model.vocab_size, "prompt")
    for ids in [[], [50], [-1, 3], [10**5000]]:
        with pytest.raises(RequestError):
            check_prompt(ids, INFO.resolved.model.vocab_size, "prompt")


def seeds_of(**fields: Any) -> list[int | None]:
    request = translate(completion(prompt=[1, 2], **fields), "id", INFO)
    tracker = RequestTracker(ServerMetrics().unnamed, "completions", "")
    incoming = Incoming("id", tracker, seed=2**128 - 1, created=0)
    plan = asyncio.run(plan_texts(FakeEngineClient(), ServerOptions(), request, incoming))
    assert all(sequence.params.n == 1 for sequence in plan.sequences)
    return [sequence.params.seed for sequence in plan.sequences]


def test_whoever_hands_in_a_request_may_make_it_flex() -> None:
    request = translate(completion(prompt=[1, 2], n=2), "id", INFO)
    tracker = RequestTracker(ServerMetrics().unnamed, "completions", "")
    incoming = Incoming("id", tracker, seed=0, created=0, is_flex=True)
    plan = asyncio.run(plan_texts(FakeEngineClient(), ServerOptions(), request, incoming))
    assert [sequence.is_flex for sequence in plan.sequences] == [True, True]


def test_seeds_count_up_wrap_and_differ() -> None:
    assert seeds_of(seed=7, n=3) == [7, 8, 9]
    assert seeds_of(seed=2**63 - 1, n=2) == [2**63 - 1, -(2**63)]
    seeds = seeds_of(n=100)
    assert len(set(seeds)) == 100
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    with pytest.raises(RequestError, match="seed"):
        seeds_of(seed=2**63)
    with pytest.raises(RequestError, match="n must be between 1 and 128"):
        seeds_of(n=129)
    with pytest.raises(RequestError, match="not one of more than 64 bits"):
        seeds_of(seed=10**4000)


ENTRIES = [
    LogprobEntry("a", 1, -0.5, [97], [("a", 1, -0.5, [97]), ("b", 2, -1.0, [98])], 0),
    LogprobEntry("c", 3, float("-inf"), [99], [("a", 1, -0.5, [97]), ("b", 2, -1.0, [98])], 1, 7),
]


def test_logprobs_in_all_shapes() -> None:
    assert completion_logprobs(ENTRIES, [4, 5], LogprobStyle(1)) == {
        "text_offset": [4, 5],
        "token_logprobs": [-0.5, -9999.0],
        "tokens": ["a", "c"],
        "top_logprobs": [{"a": -0.5}, {"a": -0.5, "c": -9999.0}],
    }
    assert chat_logprobs(ENTRIES[:1], LogprobStyle(2)) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.0, "bytes": [98]},
                ],
            }
        ],
        "refusal": None,
    }
    assert prompt_logprobs([None, ENTRIES[1]]) == [
        None,
        {
            "3": {"logprob": -9999.0, "rank": 7, "decoded_token": "c"},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_listed_tokens_and_tokens_as_ids() -> None:
    style = LogprobStyle(0, listed=True, as_token_ids=True)
    found = completion_logprobs(ENTRIES, [0, 1], style)
    assert found["tokens"] == ["token_id:1", "token_id:3"]
    assert [list(top) for top in found["top_logprobs"]] == [
        ["token_id:1", "token_id:2"],
        ["token_id:3", "token_id:1", "token_id:2"],
    ]
    content = chat_logprobs(ENTRIES, style)["content"]
    assert [entry["token"] for entry in content] == ["token_id:1", "token_id:3"]
    assert [top["token"] for top in content[1]["top_logprobs"]] == [
        "token_id:3",
        "token_id:1",
        "token_id:2",
    ]


def test_chunks_are_one_line_of_json_for_every_reader() -> None:
    head = {"id": 'i"d', "object": "o", "created": 1, "model": "m"}
    encoder = ChunkEncoder(head, "text", 2, with_usage=True)
    text = 'a"\n\u2028\u2029\x85\r é😀'
    data = encoder.chunk(1, encode_json(text))
    assert data.endswith(b"\n\n")
    assert len(data.decode().splitlines()) == 2
    chunk = json.loads(data.removeprefix(b"data: "))
    assert chunk == {
        "id": 'i"d',
        "object": "o",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 1,
                "text": text,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            }
        ],
        "usage": None,
    }
    full = encoder.full_chunk(
        1, encode_json(text), logprobs=None, finish_reason=None, stop_reason=None
    )
    assert json.loads(full.removeprefix(b"data: ")) == chunk
    last = json.loads(encoder.usage_chunk({"total_tokens": 3}).removeprefix(b"data: "))
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 3})
