"""`/tokenize` and `/detokenize` of a live server."""

from __future__ import annotations

from typing import Any

import httpx

from engine.tokenizer.tokenizer import Tokenizer


def test_tokens_there_and_back(url: str) -> None:
    base = url.removesuffix("/v1")
    tokenizer = Tokenizer.from_pretrained("models/manta-small")
    text = "def f():\n    return '<|end|> é'"
    got = httpx.post(f"{base}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert got["tokens"] == tokenizer.encode(text)
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    back = httpx.post(f"{base}/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": f"<|begin_of_text|>{text}"}


def test_a_conversation_has_the_ids_of_its_prompt(url: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What does len do?"}]
    got = httpx.post(f"{url.removesuffix('/v1')}/tokenize", json={"messages": messages}).json()
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
    assert got["tokens"] == reply["prompt_token_ids"]
