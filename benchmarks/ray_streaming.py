"""Ray Serve's own way to stream tokens, with which Manta's token path is compared.

An ingress deployment (FastAPI, `StreamingResponse`) iterates over the async generator of an engine
deployment through its handle, one item per token. The engine is a timer: every `step_ms` each
running stream gets a token. Texts are those of random tokens of the carried model, decoded
beforehand, and chunks are made by the code that makes Manta's.
"""

# No `from __future__ import annotations`: Ray Serve and FastAPI inspect the annotations.
import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deploy.http.body import encode_json
from deploy.http.openai.generation import usage
from deploy.http.openai.sse import DONE, ChunkEncoder
from engine.checkpoint.folder import resolve_model_path
from engine.tokenizer.detokenizer import IncrementalDetokenizer
from engine.tokenizer.tokenizer import Tokenizer

MODEL = "models/manta-small"
NUM_TEXTS = 4096
CPUS_PER_REPLICA = 0.02

app = FastAPI()


class Engine:
    """Gives each running stream a token every `step_ms`."""

    def __init__(self, step_ms: float) -> None:
        self._step_s = step_ms / 1e3
        self._texts = random_texts()
        self._running: dict[str, asyncio.Queue[int]] = {}
        self._is_busy = asyncio.Event()
        self._timer: asyncio.Task[None] | None = None
        self._steps: list[float] = []
        self._first_step: dict[str, int] = {}

    async def generate(self, request_id: str, max_tokens: int) -> AsyncGenerator[str, None]:
        """Texts of `max_tokens` tokens as they come."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().create_task(self._run())
        tokens: asyncio.Queue[int] = asyncio.Queue()
        self._running[request_id] = tokens
        self._first_step[request_id] = len(self._steps)
        self._is_busy.set()
        try:
            for _ in range(max_tokens):
                yield self._texts[await tokens.get() % NUM_TEXTS]
        finally:
            del self._running[request_id]
            if not self._running:
                self._is_busy.clear()

    async def steps(self) -> tuple[list[float], dict[str, int]]:
        """End of every step in monotonic seconds, and the first step of every request."""
        return self._steps, self._first_step

    async def _run(self) -> None:
        due = time.monotonic()
        while True:
            await self._is_busy.wait()
            now = time.monotonic()
            due = max(due + self._step_s, now)
            await asyncio.sleep(due - now)
            step = len(self._steps)
            self._steps.append(time.monotonic())
            for tokens in self._running.values():
                tokens.put_nowait(step)


@serve.ingress(app)
class Ingress:
    """The HTTP side: only the part of the API that the benchmark's client uses."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine
        self._stream = engine.options(method_name="generate", stream=True)

    @app.get("/health")
    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/steps")
    async def steps(self) -> list[Any]:
        return list(await self._engine.steps.remote())

    @app.post("/v1/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        num_tokens = body["max_tokens"]
        head = {
            "id": f"cmpl-{body['user']:>032}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": "manta-small",
        }
        encoder = ChunkEncoder(head, "text", 1, with_usage=True)
        left = num_tokens
        async for text in self._stream.remote(body["user"], num_tokens):
            left -= 1
            if left:
                yield encoder.chunk(0, encode_json(text))
            else:
                yield encoder.full_chunk(
                    0, encode_json(text), logprobs=None, finish_reason="length", stop_reason=None
                )
        yield encoder.usage_chunk(usage(len(body["prompt"]), num_tokens, 0)) + DONE


def random_texts() -> list[str]:
    """Texts of random tokens, as an incremental detokenizer gives them; none is empty."""
    tokenizer = Tokenizer.from_pretrained(str(resolve_model_path(MODEL)))
    detokenizer = IncrementalDetokenizer.create(tokenizer)
    rng = np.random.default_rng(0)
    texts: list[str] = []
    while len(texts) < NUM_TEXTS:
        text = detokenizer.add(int(rng.integers(2, tokenizer.vocab_size)))
        if text:
            texts.append(text)
    return texts


def build_app(args: dict[str, Any]) -> Application:
    """The application of a Serve config with `args: {step_ms: ...}`."""
    options: dict[str, Any] = {
        "max_ongoing_requests": 1000,
        "ray_actor_options": {"num_cpus": CPUS_PER_REPLICA},
    }
    engine = serve.deployment(Engine, name="engine", **options).bind(args["step_ms"])
    return serve.deployment(Ingress, name="ingress", **options).bind(engine)
