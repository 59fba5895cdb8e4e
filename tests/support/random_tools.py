"""Chats that must call one of some random tools."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from tests.support.random_schemas import check_json, random_object

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


def check_random_tools(url: str, count: int) -> None:
    """Every call of `count` replies follows its schema. Strings and numbers may be endless, and
    nothing keeps a model from calling again, so some outputs are cut: at most a tenth."""
    cut = 0
    for tools, choice in asyncio.run(_ask_all(url, count)):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        calls = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        if choice["finish_reason"] == "length":
            cut += 1
            calls = calls[:-1]
        else:
            assert choice["finish_reason"] == "tool_calls" and calls
        for call in calls:
            check_json(call["function"]["arguments"], schemas[call["function"]["name"]])
    assert cut <= count // 10, cut


async def _ask_all(url: str, count: int) -> list[tuple[list[Any], dict[str, Any]]]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(_ask(client, seed) for seed in range(count)))


async def _ask(client: httpx.AsyncClient, seed: int) -> tuple[list[Any], dict[str, Any]]:
    rng = random.Random(seed)
    tools = [
        {"type": "function", "function": {"name": f"tool-{i}", "parameters": random_object(rng)}}
        for i in range(rng.randrange(1, 5))
    ]
    body = {
        "model": "manta-small",
        "messages": ASK,
        "tools": tools,
        "tool_choice": "required",
        "seed": seed,
        "max_tokens": 600,
        "parallel_tool_calls": seed % 4 == 0,
    }
    reply = await client.post("/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return tools, reply.json()["choices"][0]
