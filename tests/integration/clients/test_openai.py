"""The official `openai` client against a live server: every field that docs/api.md lists."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from engine.tokenizer.tokenizer import Tokenizer

MODEL = "manta-small"
ASK: list[Any] = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(f"models/{MODEL}")


def complete(client: openai.OpenAI, prompt: Any = "def main():", **fields: Any) -> Any:
    extra = {key: fields.pop(key) for key in list(fields) if key in EXTRA}
    options = {"model": MODEL, "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(prompt=prompt, extra_body=extra, **options)


EXTRA = {
    "allowed_token_ids",
    "bad_words",
    "add_special_tokens",
    "cache_salt",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprob_token_ids",
    "min_p",
    "min_tokens",
    "prompt_logprobs",
    "repetition_penalty",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "stop_token_ids",
    "stream_interval",
    "top_k",
    "truncate_prompt_tokens",
    "truncation_side",
}


def test_allowed_token_ids(client: openai.OpenAI) -> None:
    reply = complete(client, allowed_token_ids=[40, 41, 42], return_token_ids=True, temperature=1)
    assert set(reply.choices[0].token_ids) <= {40, 41, 42}


def test_bad_words_are_not_written(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    free = complete(client, return_token_ids=True, max_tokens=24).choices[0]
    # Words of one token and of several, out of what would have been written.
    words = [tokenizer.token_text(free.token_ids[2]), tokenizer.decode(free.token_ids[4:6])]
    words = [word for word in words if word.strip()]
    held = complete(client, bad_words=words, return_token_ids=True, max_tokens=24).choices[0]
    ids = held.token_ids
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            bad = tokenizer.encode(text, add_special_tokens=False)
            assert all(ids[i : i + len(bad)] != bad for i in range(len(ids))), (word, held.text)
    assert held.text != free.text


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_truncate_prompt_tokens(client: openai.OpenAI, side: str | None) -> None:
    prompt = list(range(10, 30))
    fields = {} if side is None else {"truncation_side": side}
    reply = complete(client, prompt, truncate_prompt_tokens=5, return_token_ids=True, **fields)
    kept = prompt[:5] if side == "right" else prompt[-5:]
    assert reply.choices[0].prompt_token_ids == kept
    assert reply.usage.prompt_tokens == 5
    whole = complete(client, kept)
    assert whole.choices[0].text == reply.choices[0].text


def test_logprob_token_ids_agree_with_the_likeliest(client: openai.OpenAI) -> None:
    fields = {"logprobs": 5, "return_tokens_as_token_ids": True}
    top = complete(client, **fields).choices[0].logprobs
    first = dict(top.top_logprobs[0])
    listed = [int(name.partition(":")[2]) for name in first]
    again = complete(client, **fields, logprob_token_ids=[*listed, 7]).choices[0].logprobs
    assert again.tokens == top.tokens
    for name, value in first.items():
        assert again.top_logprobs[0][name] == pytest.approx(value, abs=1e-4)
    assert all("token_id:7" in position for position in again.top_logprobs)


def test_chat_names_listed_tokens_too(client: openai.OpenAI) -> None:
    extra = {"logprob_token_ids": [7, 8], "return_tokens_as_token_ids": True}
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=3, temperature=0, logprobs=True, extra_body=extra
    )
    assert reply.choices[0].logprobs is not None
    for entry in reply.choices[0].logprobs.content or []:
        names = [top.token for top in entry.top_logprobs]
        assert names == [entry.token, "token_id:7", "token_id:8"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_have_true_ranks(client: openai.OpenAI, stream: bool) -> None:
    prompt = list(range(30, 60))
    if stream:
        chunks = list(complete(client, prompt, prompt_logprobs=1, stream=True))
        found = chunks[0].choices[0].prompt_logprobs
        assert all(not hasattr(c.choices[0], "prompt_logprobs") for c in chunks[1:])
    else:
        found = complete(client, prompt, prompt_logprobs=1).choices[0].prompt_logprobs
    assert found[0] is None and len(found) == len(prompt)
    is_likeliest = set()
    for token, position in zip(prompt[1:], found[1:], strict=True):
        own = position[str(token)]
        best = next(entry for entry in position.values() if entry["rank"] == 1)
        assert own["rank"] >= 1
        assert (own["rank"] == 1) == (own["logprob"] == best["logprob"])
        is_likeliest.add(own["rank"] == 1)
    assert False in is_likeliest


def test_echo_with_a_stream_of_several(client: openai.OpenAI) -> None:
    fields = {"echo": True, "n": 2, "logprobs": 1, "seed": 3, "temperature": 1}
    whole = complete(client, "import os", **fields)
    parts: dict[int, str] = {0: "", 1: ""}
    tokens: dict[int, list[str]] = {0: [], 1: []}
    for chunk in complete(client, "import os", stream=True, **fields):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    for choice in whole.choices:
        assert choice.text.startswith("import os")
        assert parts[choice.index] == choice.text
        assert tokens[choice.index] == choice.logprobs.tokens


def test_stream_interval(client: openai.OpenAI) -> None:
    fields = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True, "stream": True}
    chunks = complete(client, stream_interval=8, **fields)
    sizes = [len(c.choices[0].token_ids) for c in chunks if c.choices[0].token_ids]
    assert sizes[0] < 8 and sum(sizes) == 20 and len(sizes) <= 5
    assert all(size >= 8 for size in sizes[1:-1])


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=5, stream=True, stream_options=options
        )
    )
    assert all(chunk.usage is not None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts[0] == 0 and counts == sorted(counts)
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=5, stream=True, stream_options=options
        )
    )
    assert all(chunk.usage is None for chunk in chunks)


def test_the_stream_helper_gathers_the_same_reply(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_reply_can_be_sent_back_with_a_tools_result(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4)
    back = reply.choices[0].message.model_dump()
    again = client.chat.completions.create(model=MODEL, messages=[*ASK, back, ASK[0]], max_tokens=4)
    assert again.usage is not None and again.usage.prompt_tokens > 0


def test_optional_keys_are_null(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2).model_dump()
    for key in ("prompt_logprobs", "prompt_token_ids", "system_fingerprint", "service_tier"):
        assert chat[key] is None
    for key in ("token_ids", "stop_reason", "logprobs"):
        assert chat["choices"][0][key] is None
    text = complete(client, ignore_eos=True).model_dump()["choices"][0]
    for key in ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason", "logprobs"):
        assert text[key] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
        ({"extra_body": {"allowed_token_ids": [10**7]}}, "allowed_token_ids"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
        ({"extra_body": {"chat_template_kwargs": {"bos_token": "x"}}}, "chat_template_kwargs"),
    ],
)
def test_what_is_not_supported_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2, **fields)
    assert caught.value.param == param


def test_the_async_client_runs_many_at_once(url: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt="def ", max_tokens=8, seed=seed % 2, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(20)))

    texts = asyncio.run(run())
    assert len(set(texts)) == 2


class Person(BaseModel):
    name: str
    age: int
    tags: list[Literal["a", "b"]]


SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["x", "y"]},
    },
    "required": ["size", "kind"],
    "additionalProperties": False,
}


def test_parse_gives_pydantic_models(client: openai.OpenAI) -> None:
    parsed = 0
    for seed in range(6):
        try:
            reply = client.chat.completions.parse(
                model=MODEL, messages=ASK, max_tokens=300, seed=seed, response_format=Person
            )
        except openai.LengthFinishReasonError:  # the model writes long strings
            continue
        assert isinstance(reply.choices[0].message.parsed, Person)
        parsed += 1
    assert parsed >= 3


def test_a_stream_is_parsed(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": ASK, "max_tokens": 300, "seed": 1}
    schema = {"name": "thing", "schema": SCHEMA, "strict": True}
    response_format: Any = {"type": "json_schema", "json_schema": schema}
    with client.chat.completions.stream(**fields, response_format=response_format) as stream:
        final = stream.get_final_completion()
    thing = json.loads(final.choices[0].message.content or "")
    assert set(thing) == {"size", "kind"} and 1 <= thing["size"] <= 99


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]+!"}}, "[a-c]{3}-[0-9]+!"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
        ({"structured_outputs": {"grammar": 'start: "q" /[xy]+z/'}}, "q[xy]+z"),
        ({"guided_regex": "(ab)+c"}, "(ab)+c"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
    ],
)
def test_vllms_structured_outputs(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        reply = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=100, seed=seed, extra_body=fields
        )
        choice = reply.choices[0]
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.message.content or ""), choice
        text = client.completions.create(
            model=MODEL, prompt="x", max_tokens=100, seed=seed, extra_body=fields
        ).choices[0]
        if text.finish_reason == "stop":
            assert re.fullmatch(pattern, text.text), text


@pytest.mark.parametrize("key", ["structured_outputs", "guided_json", "response_format"])
def test_json_in_three_ways(client: openai.OpenAI, key: str) -> None:
    value: Any = {
        "structured_outputs": {"json": SCHEMA},
        "guided_json": SCHEMA,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    }[key]
    done = 0
    for seed in range(4):
        reply = complete_with(client, {key: value}, seed)
        if reply.finish_reason == "stop":
            done += 1
            jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert done >= 3


def test_json_object(client: openai.OpenAI) -> None:
    value = {"response_format": {"type": "json_object"}}
    replies = [complete_with(client, value, seed) for seed in range(8)]
    done = [reply for reply in replies if reply.finish_reason == "stop"]
    assert done and all(isinstance(json.loads(reply.text), dict) for reply in done)


def complete_with(client: openai.OpenAI, extra: dict[str, Any], seed: int) -> Any:
    return client.completions.create(
        model=MODEL, prompt="x = ", max_tokens=250, seed=seed, extra_body=extra
    ).choices[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_regex": "(" * 30_000}, "guided_regex"),
        ({"guided_choice": ["x" * 200] * 10_000}, "guided_choice"),
    ],
)
def test_bad_grammars_fail_their_own_request(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=4, extra_body=fields)
    assert caught.value.param == param
    assert complete(client).choices[0].text


def test_a_constraint_goes_with_other_fields(client: openai.OpenAI) -> None:
    extra = {"guided_regex": "[ab]{4}", "bad_words": ["b"], "return_token_ids": True}
    reply = client.completions.create(
        model=MODEL, prompt="x", max_tokens=20, n=3, seed=1, logprobs=2, extra_body=extra
    )
    assert len(reply.choices) == 3
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert re.fullmatch("[ab]{4}", choice.text)


def random_fields(rng: random.Random) -> dict[str, Any]:
    """A valid request for both endpoints, from the fields that shape a reply."""
    optional: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1.5]),
        "top_p": rng.choice([0.5, 0.95]),
        "top_k": rng.choice([1, 20]),
        "min_p": 0.05,
        "n": rng.choice([1, 2, 3]),
        "stop": rng.choice([["\n"], ["e", "():"], "re"]),
        "include_stop_str_in_output": True,
        "min_tokens": 4,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logit_bias": {"17": 5, "300": -100},
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "allowed_token_ids": rng.sample(range(4096), 400),
        "bad_words": ["self", "def", "\u00e9"],
        "prompt_logprobs": rng.choice([0, 2]),
        "truncate_prompt_tokens": rng.choice([-1, 6]),
        "return_tokens_as_token_ids": True,
        "stream_interval": rng.choice([2, 5]),
    }
    names = rng.sample(sorted(optional), rng.randrange(1, 9))
    fields = {name: optional[name] for name in names}
    return fields | {"seed": rng.randrange(10**6), "max_tokens": rng.randrange(4, 24)}


@pytest.mark.parametrize("seed", range(24))
def test_a_stream_is_the_reply_in_pieces(url: str, tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    is_chat = rng.random() < 0.5
    body = random_fields(rng) | {"return_token_ids": True}
    if is_chat:
        body |= {"messages": ASK}
        body |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.5 else {}
    else:
        body |= {"prompt": "class A\u00e9\U0001f600:\n    def "}
        body |= {"logprobs": 2} if rng.random() < 0.5 else {}
        body |= {"echo": True} if rng.random() < 0.3 else {}
    path = f"{url}/chat/completions" if is_chat else f"{url}/completions"
    reply = httpx.post(path, json=body, timeout=60)
    assert reply.status_code == 200, (body, reply.text)
    whole = reply.json()
    streamed = httpx.post(path, json=body | {"stream": True}, timeout=60).text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        text = choice["message"]["content"] if is_chat else choice["text"]
        pieces = [c["delta"].get("content", "") if is_chat else c["text"] for c in mine]
        assert "".join(pieces) == text
        ids = [token for c in mine for token in c.get("token_ids") or []]
        assert ids == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        found = [c["logprobs"] for c in mine if c["logprobs"]]
        if choice["logprobs"] is None:
            assert not found
        elif is_chat:
            entries = [entry for part in found for entry in part["content"]]
            assert entries == choice["logprobs"]["content"]
        else:
            for key, values in choice["logprobs"].items():
                assert [value for part in found for value in part[key]] == values
        if choice["finish_reason"] == "length" and not body.get("echo"):
            skip = body.get("skip_special_tokens", True)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == text


def test_prediction_without_speculation(client: openai.OpenAI) -> None:
    """It is accepted, and has no effect."""
    prediction: Any = {"type": "content", "content": "It joins the parts of a path."}
    ask: Any = {"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0}
    reply = client.chat.completions.create(prediction=prediction, **ask)
    without = client.chat.completions.create(**ask)
    assert reply.choices[0].message.content == without.choices[0].message.content
    details = reply.usage and reply.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
