"""The official `openai` client against `/v1/embeddings` of a live server; `/v1/score`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from engine import LLM
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.http_server import metric, settled_metric, wait_idle

MODEL = "manta-small"
TEXTS = ["def add(a, b):\n    return a + b", "def sub(a, b):\n    return a - b", "Bread is food."]
HIDDEN = 256


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(f"models/{MODEL}", dtype="float32", max_total_tokens=8192, cpu_threads=1) as made:
        yield made


def vectors(reply: Any) -> np.ndarray:
    assert [item.index for item in reply.data] == list(range(len(reply.data)))
    return np.array([item.embedding for item in reply.data], np.float32)


def test_a_batch_equals_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    reply = client.embeddings.create(model=MODEL, input=TEXTS)
    wanted = llm.embed(TEXTS, use_tqdm=False)
    assert np.allclose(vectors(reply), [out.embedding for out in wanted], atol=1e-5)
    assert np.allclose(np.linalg.norm(vectors(reply), axis=1), 1, atol=1e-5)
    assert reply.model == MODEL and reply.object == "list"
    assert reply.usage.prompt_tokens == sum(len(out.prompt_token_ids) for out in wanted)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens


def test_floats_and_base64_are_the_same_numbers(client: openai.OpenAI) -> None:
    """The client asks for base64 by itself, and decodes it."""
    prompt = list(range(100, 140))
    client.embeddings.create(model=MODEL, input=prompt)  # from here on both have the same cache
    default = client.embeddings.create(model=MODEL, input=prompt)
    floats = client.embeddings.create(model=MODEL, input=prompt, encoding_format="float")
    coded = client.embeddings.create(model=MODEL, input=prompt, encoding_format="base64")
    text: Any = coded.data[0].embedding
    assert np.array_equal(vectors(floats), vectors(default))
    assert np.array_equal(vectors(floats)[0], np.frombuffer(base64.b64decode(text), "<f4"))


def test_text_and_ids_are_the_same(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.from_pretrained(f"models/{MODEL}")
    ids = [tokenizer.encode(text) for text in TEXTS]
    texts = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
    assert np.allclose(vectors(client.embeddings.create(model=MODEL, input=ids)), texts, atol=1e-5)
    one = vectors(client.embeddings.create(model=MODEL, input=ids[1]))
    assert np.allclose(one[0], texts[1], atol=1e-5)


def test_dimensions(client: openai.OpenAI) -> None:
    whole = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
    short = vectors(client.embeddings.create(model=MODEL, input=TEXTS, dimensions=16))
    assert short.shape == (3, 16)
    wanted = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    assert np.allclose(short, wanted, atol=1e-5)
    raw = client.embeddings.create(model=MODEL, input=TEXTS, extra_body={"normalize": False})
    lengths = np.linalg.norm(vectors(raw), axis=1, keepdims=True)
    assert np.allclose(vectors(raw) / lengths, whole, atol=1e-5) and (lengths > 1.5).all()


def test_a_repeated_prompt_comes_from_the_cache(client: openai.OpenAI) -> None:
    prompt = [7 + i % 400 for i in range(100)]
    first = client.embeddings.create(model=MODEL, input=prompt)
    again = client.embeddings.create(model=MODEL, input=prompt)
    assert np.allclose(vectors(first), vectors(again), atol=1e-5)
    details: Any = again.usage.model_extra
    assert details["prompt_tokens_details"]["cached_tokens"] == 96


def test_many_beside_a_chat(client: openai.OpenAI, url: str) -> None:
    ask: Any = [{"role": "user", "content": "What is a list?"}]
    fields: Any = {"model": MODEL, "messages": ask, "temperature": 0, "max_tokens": 40}
    alone = client.chat.completions.create(**fields).choices[0].message.content
    prompts = [[10 + i % 900, *range(20, 60)] for i in range(500)]

    async def run() -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as asking:
            return await asyncio.gather(
                asking.embeddings.create(model=MODEL, input=prompts),
                asking.chat.completions.create(**fields),
            )

    embedded, chatted = asyncio.run(run())
    assert chatted.choices[0].message.content == alone
    found = vectors(embedded)
    assert found.shape == (500, HIDDEN) and np.isfinite(found).all()
    assert np.allclose(
        found[:1], vectors(client.embeddings.create(model=MODEL, input=prompts[0])), atol=1e-5
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [[5], []]}, "input"),
        ({"input": [5000]}, "input"),
        ({"input": [5] * 5000}, "input"),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "extra_body": {"messages": []}}, "messages"),
    ],
)
def test_errors_name_their_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, **fields)
    assert caught.value.param == param


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_clients_that_leave_end_their_texts(url: str) -> None:
    base = url.removesuffix("/v1")
    before = settled_metric(base, "manta_engine_prompt_tokens_total")
    body = {"input": [[i, *range(100, 1100)] for i in range(10, 410)]}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/embeddings", json=body, timeout=0.5)
    wait_idle(base, 5.0)
    assert metric(base, "manta_engine_prompt_tokens_total") - before < 400 * 1001 / 2
    assert metric(base, "manta_engine_kv_leaks_total") == 0


def test_score(url: str, llm: LLM) -> None:
    body = {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS}
    reply = httpx.post(f"{url}/score", json=body, timeout=60).json()
    wide = np.stack([out.embedding for out in llm.embed(TEXTS, use_tqdm=False)])
    scores = [item["score"] for item in reply["data"]]
    assert np.allclose(scores, wide @ wide[0], atol=1e-4)
    assert scores[0] == pytest.approx(1.0) and scores[0] > scores[1] > scores[2]
    assert [item["index"] for item in reply["data"]] == [0, 1, 2]
