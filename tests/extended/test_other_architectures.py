"""A mixture of experts that transformers' code computes, served over HTTP as any other model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines import greedy_reference, load_reference
from tests.support.families import with_tokenizer
from tests.support.http_server import manta_leaving_nothing
from tests.support.models import THROUGH_TRANSFORMERS, make_model

MAX_NEW = 12


def test_it_is_served(tmp_path: Path) -> None:
    arch, keys = THROUGH_TRANSFORMERS["qwen3_moe"]
    folder = with_tokenizer(make_model(tmp_path, arch, vocab_size=4096, **keys))
    prompts = [[5 + number, *range(20, 50 + 3 * number)] for number in range(12)]
    expected = greedy_reference(load_reference(folder), prompts, MAX_NEW)
    options: dict[str, Any] = {"max_tokens": MAX_NEW, "temperature": 0, "ignore_eos": True}
    config = {"model": str(folder), "dtype": "float32", "served_model_name": "moe"}
    with (
        manta_leaving_nothing("configs/llama.yaml", **config) as server,
        httpx.Client(base_url=server.base_url, timeout=60) as client,
    ):

        def complete(prompt: list[int]) -> list[int]:
            body = {"model": "moe", "prompt": prompt, "return_token_ids": True, **options}
            (choice,) = (
                client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            )
            return list(choice["token_ids"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(complete, prompts)) == expected
            assert list(pool.map(complete, prompts)) == expected, "from the prefix cache"
        chat = {"model": "moe", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=chat).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] >= 1
        vector = client.post("/v1/embeddings", json={"model": "moe", "input": "hello"})
        assert len(vector.raise_for_status().json()["data"][0]["embedding"]) == 32
