"""`ServeEngineClient`: the engine behind Ray Serve, as the HTTP layer sees it.

Text and tokens travel by message (tokenizer actor), each request's life is one unary Serve call
to an engine replica.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ray
from ray import serve

from deploy.async_inbox import AsyncInbox
from deploy.delta_stream import DeltaStream
from deploy.engine_client import EngineClient, EngineHealth, GenerateRequest, ModelInfo
from engine import messages
from engine.actors.ray_types import node_ip
from engine.actors.tokenizer_actor import RemoteTokenizerActor
from engine.errors import EngineDeadError, RequestError
from engine.messages import AddRequest
from engine.tokenizer import tokenizer_messages as tm
from engine.tokenizer.detokenizer_manager import TextDelta
from engine.trace import chrome_trace
from engine.transport import Outbox

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
END_TIMEOUT_S = 30.0
"""After the engine said a request ended, its last text must arrive within this."""


class ServeEngineClient(EngineClient):
    """One per ingress replica; owns its tokenizer actor."""

    def __init__(self, engines: Any, model_path: str, name: str, max_model_len: int) -> None:
        self._engines = engines
        self._model_path = model_path
        self._name = name
        self._max_model_len = max_model_len
        self._info: ModelInfo | None = None
        self._rids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, DeltaStream] = {}
        self._open_calls: set[asyncio.Task[None]] = set()
        self._tokenizer_death = ""

    async def start(self, vocab_size: int) -> None:
        """Start the tokenizer and wait until it answers. `vocab_size` is the model's."""
        self._actor = RemoteTokenizerActor.remote(self._model_path)
        self._client_address, _ = await self._actor.describe.remote()
        self._inbox = AsyncInbox(node_ip(), self._on_message)
        self._tokenizer = Outbox(self._client_address)
        self._watcher = asyncio.get_running_loop().create_task(
            self._watch(self._actor.run.remote())
        )
        self._info = ModelInfo(self._name, self._max_model_len, vocab_size, int(time.time()))

    def stop(self) -> None:
        """Stop the tokenizer."""
        self._watcher.cancel()
        self._tokenizer.send(messages.Shutdown())
        self._tokenizer.close()
        self._inbox.close()
        ray.kill(self._actor)

    @property
    def model_info(self) -> ModelInfo:
        if self._info is None:
            raise EngineDeadError("the server is still starting")
        return self._info

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        call = next(self._rids)
        reply = await self._ask(
            call, tm.EncodeRequest(call, self._inbox.address, texts, add_special_tokens)
        )
        return _ids(reply)

    async def decode(self, token_ids: list[int]) -> str:
        call = next(self._rids)
        reply = await self._ask(call, tm.DecodeRequest(call, self._inbox.address, token_ids))
        return str(reply.text)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        call = next(self._rids)
        request = tm.ChatRequest(
            call,
            self._inbox.address,
            messages,
            add_generation_prompt,
            continue_final_message,
            chat_template,
            tools,
            template_kwargs,
        )
        return _ids(await self._ask(call, request))[0]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TextDelta]:
        rid = next(self._rids)
        stream = self._streams[rid] = DeltaStream()
        call: asyncio.Task[None] | None = None
        ended = False
        try:
            await self._ask(
                rid,
                tm.Register(
                    rid,
                    self._inbox.address,
                    rid,
                    request.params,
                    request.prompt_ids,
                    [],
                    return_token_ids=request.return_token_ids,
                ),
            )
            call = self._start_call(rid, request, stream)
            while not ended:
                delta = await stream.get()
                ended = delta.finish_reason is not None
                if delta.finish_reason == "error":
                    raise RequestError(
                        delta.error, delta.error_param, status=delta.error_status or 500
                    )
                yield delta
        finally:
            del self._streams[rid]
            if not ended:
                # The reader left or the engine is lost: cancelling the call aborts the request.
                self._tokenizer.send(tm.Unregister(rid))
                if call is not None:
                    call.cancel()

    def _start_call(
        self, rid: int, request: GenerateRequest, stream: DeltaStream
    ) -> asyncio.Task[None]:
        """Open the request's unary call to an engine replica; its failure fails `stream`."""
        add = AddRequest(
            rid=rid,
            client=self._client_address,
            request_id=request.request_id,
            input_ids=np.asarray(request.prompt_ids, np.int32),
            params=request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_s=request.timeout_s,
        )

        async def run() -> None:
            # The call crosses Ray as one byte string.
            response = self._engines.generate.remote(messages.encode_inline(add))
            try:
                await response
            except asyncio.CancelledError:
                response.cancel()
                raise

        def on_end(task: asyncio.Task[None]) -> None:
            self._open_calls.discard(task)
            if task.cancelled():
                return
            error = task.exception()
            if error is not None:
                stream.fail(EngineDeadError(f"the engine was lost: {type(error).__name__}"))
                return
            lost = EngineDeadError("the engine ended the request but its last tokens never came")
            asyncio.get_running_loop().call_later(END_TIMEOUT_S, stream.fail, lost)

        task = asyncio.ensure_future(run())
        self._open_calls.add(task)
        task.add_done_callback(on_end)
        return task

    async def health(self) -> EngineHealth:
        if self._info is None:
            return EngineHealth(False, "starting")
        if self._tokenizer_death:
            return EngineHealth(False, self._tokenizer_death)
        try:
            replies = await self._ask_engines("stats")
            missing = await asyncio.to_thread(_replicas_not_running)
        except Exception as error:  # whatever failed, the answer is "not healthy", and why
            return EngineHealth(False, f"{type(error).__name__}: {str(error)[:300]}")
        lost = [str(r).strip().splitlines()[-1] for r in replies if isinstance(r, Exception)]
        if lost or missing or not replies:
            return EngineHealth(False, "; ".join([*lost, missing]) or "no engine replica")
        return EngineHealth(True, "", {str(r["replica"]): r for r in replies})

    async def stats(self) -> list[dict[str, float]]:
        return [r for r in await self._ask_engines("stats") if not isinstance(r, Exception)]

    async def trace(self, last: int) -> dict[str, Any]:
        answers = await self._ask_engines("trace", last)
        return chrome_trace(dict(a for a in answers if not isinstance(a, Exception)))

    async def _ask_engines(self, method: str, *args: Any) -> list[Any]:
        """Answers of every engine replica; the exception instead where one fails."""
        answers: list[Any] = await self._engines.broadcast(method, *args).results_async(
            timeout_s=HEALTH_TIMEOUT_S, return_exceptions=True
        )
        return answers

    def check(self) -> None:
        """Raises `EngineDeadError` if the tokenizer is lost."""
        if self._tokenizer_death:
            raise EngineDeadError(self._tokenizer_death)

    async def _ask(self, call: int, request: Any) -> Any:
        self.check()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._tokenizer.send(request)
            return await future
        finally:
            self._calls.pop(call, None)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, tm.TextOutputs):
            for delta in message.deltas:
                stream = self._streams.get(delta.rid)
                if stream is not None:
                    stream.push(delta)
        elif isinstance(message, tm.EncodeReply | tm.DecodeReply | tm.Registered):
            future = self._calls.get(message.call)
            if future is not None and not future.done():
                future.set_result(message)

    async def _watch(self, run: Any) -> None:
        """The tokenizer's `run` only ends when it dies or is told to stop."""
        try:
            await run
            reason = "the tokenizer stopped"
        except asyncio.CancelledError:
            raise
        except Exception as error:  # every death of an actor arrives here, whatever its kind
            reason = f"the tokenizer died: {type(error).__name__}"
        logger.error("%s", reason)
        self._tokenizer_death = reason
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))


def _replicas_not_running() -> str:
    """Which replicas of this application aren't running, in words; "" if all are."""
    app = serve.get_replica_context().app_name
    status = serve.status().applications[app]
    for name, deployment in status.deployments.items():
        others = {s: n for s, n in deployment.replica_states.items() if s != "RUNNING" and n}
        if others or str(deployment.status.value) == "UNHEALTHY":
            return f"{name}: {deployment.status.value}, replicas {deployment.replica_states}"
    return ""


def _ids(reply: tm.EncodeReply) -> list[list[int]]:
    if reply.error:
        raise RequestError(reply.error, reply.param)
    return reply.ids
