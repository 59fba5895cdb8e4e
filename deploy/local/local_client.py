"""`LocalClient`: an engine in this process behind the interface that the HTTP layer knows."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from deploy.http.engine_client import EngineClient, EngineHealth, EngineStatus, ModelInfo
from engine.constraints import ConstraintSpec
from engine.constraints.guard import GrammarGuard
from engine.errors import ConfigError, EngineDeadError
from engine.llm import LLM
from engine.protocol.messages import AbortRequest, AddRequest
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import Conversation, Register, TextDelta
from engine.tokenizer.detokenizer_manager import DetokenizerManager
from engine.trace import RoleTrace

logger = logging.getLogger(__name__)


_Reader = tuple[Callable[[list[TextDelta]], None], asyncio.Future[None]]
"""Takes a request's deltas; its future is done at the end."""


class LocalClient(EngineClient):
    """Of one `LLM`, which a thread drives. `start` and `stop` are called in the loop."""

    def __init__(self, llm: LLM, info: ModelInfo) -> None:
        """Raises `ConfigError` if the model has no tokenizer."""
        super().__init__()
        if llm.tokenizer is None:
            raise ConfigError("the model folder has no tokenizer.")
        self._llm = llm
        self._info = info
        self._tokenizer = llm.tokenizer
        self._manager = DetokenizerManager(self._tokenizer)
        self._guard = GrammarGuard(info.resolved.model.path)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """What the thread does between steps; None: it ends."""
        self._readers: dict[int, _Reader] = {}
        self._next_rid = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name="manta-engine", daemon=True)

    def start(self) -> None:
        """Let it run."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Requests that run are given up; the `LLM` is shut down."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)
        self._guard.shutdown()
        await asyncio.to_thread(self._llm.shutdown)

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return self._tokenizer.encode_batch(texts, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def decode_each(self, token_ids: list[int]) -> list[str]:
        return [self._tokenizer.token_text(token) for token in token_ids]

    async def render_chat(self, chat: Conversation) -> list[int]:
        return self._tokenizer.encode_chat(chat)

    async def check_constraint(self, spec: ConstraintSpec) -> None:
        await asyncio.wrap_future(self._guard.submit(spec))

    async def generate(
        self,
        sequence: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        # Nothing is kept here, so no tokens are known.
        rid, self._next_rid = self._next_rid, self._next_rid + 1
        done: asyncio.Future[None] = self._loop.create_future()

        num_prompt, ids = len(sequence.prompt_ids), sequence.prompt_ids.tolist()
        register = Register(
            *(0, "", rid, sequence.params, num_prompt, ids, []), sequence.return_token_ids
        )
        add = AddRequest(rid=rid, sequence=sequence)
        try:
            if self._failure is not None:
                raise EngineDeadError("the engine has failed") from self._failure
            self._readers[rid] = read, done
            self._orders.put(lambda: self._add(register, add))
            await done
        finally:
            self._readers.pop(rid, None)
            if not done.done() or done.cancelled() or done.exception() is not None:
                self._orders.put(lambda: self._abort(rid))

    async def abort(self, request_id: str | None, owner: str | None) -> None:
        self.abort_here(request_id, owner)

    async def flush_cache(self) -> list[str]:
        return ["the engine of a batch keeps its prefix cache"]

    async def check_generate(self, timeout_s: float) -> EngineHealth:
        return await self.health()

    async def health(self) -> EngineHealth:
        if self._failure is None:
            return EngineHealth(True)
        return EngineHealth(False, f"the engine has failed: {self._failure}")

    async def stats(self) -> list[dict[str, float]]:
        return [{}]

    async def engine_status(self) -> EngineStatus:
        return EngineStatus(1, [], "")

    async def trace(self, last: int) -> dict[str, list[RoleTrace]]:
        return {}

    async def server_info(self) -> dict[str, Any]:
        return {"replicas": []}

    def _add(self, register: Register, request: AddRequest) -> None:
        self._manager.add(register)
        self._llm.core.scheduler.add(request, self._llm.core.clock())

    def _abort(self, rid: int) -> None:
        self._manager.abort(rid)
        self._llm.core.scheduler.abort(AbortRequest(rid=rid))

    def _drive(self) -> None:
        """Run steps while there are requests. In the thread."""
        core = self._llm.core
        try:
            while True:
                busy = core.scheduler.num_in_flight or not core.scheduler.is_idle
                order: Callable[[], None] | None
                try:
                    while True:
                        order = self._orders.get(block=not busy)
                        if order is None:
                            return
                        order()
                        busy = True
                except queue.Empty:
                    pass
                for _, out in core.step():
                    deltas, stopped = self._manager.process(out)
                    for rid in stopped:
                        core.scheduler.abort(AbortRequest(rid=rid))
                    self._loop.call_soon_threadsafe(self._deliver, deltas)
        except BaseException as error:
            logger.error("the engine has failed: %s", error)
            self._failure = error
            self._loop.call_soon_threadsafe(self._fail)

    def _deliver(self, deltas: list[TextDelta]) -> None:
        by_rid: dict[int, list[TextDelta]] = {}
        for delta in deltas:
            by_rid.setdefault(delta.rid, []).append(delta)
        for rid, some in by_rid.items():
            if rid not in self._readers:
                continue  # nobody waits for it any more
            read, done = self._readers[rid]
            if done.done():  # it was cancelled just now
                continue
            try:
                read(some)
            except Exception as error:
                self._readers.pop(rid)
                done.set_exception(error)
                continue
            if some[-1].finish_reason is not None:
                self._readers.pop(rid)
                done.set_result(None)

    def _fail(self) -> None:
        for _, done in self._readers.values():
            if not done.done():
                done.set_exception(EngineDeadError("the engine has failed"))
        self._readers.clear()
