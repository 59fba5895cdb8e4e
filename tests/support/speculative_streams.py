"""Streams of a server beside `engine.LLM` without speculation."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import openai

from engine import LLM, SamplingParams

MODEL = "manta-small"
CODE = (
    "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n\n    def "
)
PROMPTS = ["def main():", "Return the", CODE, "import os\nimport sys\nimport os\nimport"]
MAX_TOKENS = 200


def outputs_without_drafts() -> dict[str, list[tuple[str, list[int]]]]:
    """Text and ids of every prompt without speculation, greedy and sampled."""
    found: dict[str, list[tuple[str, list[int]]]] = {}
    with LLM(f"models/{MODEL}", dtype="float32", max_total_tokens=16384) as llm:
        for name, more in (("greedy", {"temperature": 0.0}), ("sampled", {"seed": 7})):
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **more)  # type: ignore[arg-type]
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found[name] = [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs]
    return found


def fields(name: str) -> dict[str, Any]:
    sampling = {"temperature": 0} if name == "greedy" else {"seed": 7}
    extra = {"ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": extra, **sampling}


async def stream(url: str, prompt: str, name: str, begun: asyncio.Event) -> tuple[str, list[int]]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        text, ids = "", []
        chunks = await client.completions.create(prompt=prompt, stream=True, **fields(name))
        async for chunk in chunks:
            begun.set()
            text += chunk.choices[0].text
            ids += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
        return text, ids


async def stream_all(url: str, worker: int | None = None) -> dict[str, list[tuple[str, list[int]]]]:
    """All prompts at once; when each has some output, `worker` is killed."""
    begun = [asyncio.Event() for _ in range(2 * len(PROMPTS))]
    events = iter(begun)
    streams = {
        name: [asyncio.ensure_future(stream(url, p, name, next(events))) for p in PROMPTS]
        for name in ("greedy", "sampled")
    }
    if worker is not None:
        await asyncio.gather(*(event.wait() for event in begun))
        assert not all(task.done() for tasks in streams.values() for task in tasks)
        os.kill(worker, signal.SIGKILL)
    return {name: list(await asyncio.gather(*tasks)) for name, tasks in streams.items()}
