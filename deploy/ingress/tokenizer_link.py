"""`TokenizerLink`: the tokenizer of one ingress, on its node, started again whenever it is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.ingress.listener import IngressListener
from engine.actors.actor_process import ActorProcess, this_node
from engine.actors.role_watch import RoleWatch
from engine.actors.tokenizer_actor import RemoteTokenizerActor
from engine.errors import EngineDeadError, MantaError, RequestError
from engine.process.log_lines import LogFormat
from engine.protocol.messages import Shutdown
from engine.protocol.transport import Outbox

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 120.0
"""After this time a question counts as never answered; the longest body takes about 20 s."""
MAX_ASKS = 2
"""A question isn't asked again after this number of tokenizers died under it."""
MAX_FAILED_STARTS = 5
START_TIMEOUT_S = 120.0
START_PAUSE_S = 1.0


class TokenizerLostError(MantaError):
    """The tokenizer died or hung, and what it knew is lost. Another one is being started."""


class TokenizerLink:
    """Owns the tokenizer actor. Requests and their texts are registered with the actor and lost
    with it; the listener is told of the loss."""

    def __init__(
        self,
        model_path: str,
        hang_timeout_s: float,
        listener: IngressListener,
        log_format: LogFormat = "text",
    ) -> None:
        self._model_path = model_path
        self._log_format = log_format
        self._hang_timeout_s = hang_timeout_s
        self._listener = listener
        self._up = asyncio.Event()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._actor: Any = None
        self._process: ActorProcess | None = None
        self._outbox: Outbox | None = None
        self._role_watch: RoleWatch | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[str] | None = None
        self._failed_starts = 0
        self.address = ""
        """The address that schedulers send tokens to; "" while there is no tokenizer."""

    @property
    def unwell(self) -> str:
        """What is wrong now, in words; "" if the tokenizer lives and answers."""
        if not self._up.is_set() or self._role_watch is None:
            return "the tokenizer is being started"
        return self._role_watch.unwell

    def check(self) -> None:
        """Raise `EngineDeadError` if no tokenizer can be started any more."""
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise EngineDeadError(f"the tokenizer failed to start {self._failed_starts} times")

    async def start(self) -> None:
        """Start the tokenizer and keep one running. Raises the error if the first can't start."""
        run = await self._start_actor()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(run))

    def stop(self) -> None:
        """Stop the tokenizer; no other is started."""
        if self._keeper is not None:
            self._keeper.cancel()
        self.send(Shutdown())
        self._close_outbox()
        if self._actor is not None:
            ray.kill(self._actor)

    async def ask(self, make: Callable[[int], Any], wait_s: float) -> Any:
        """The reply to the message that `make` makes of a call number.

        If the tokenizer dies meanwhile, the question is asked once more. Raises `EngineDeadError`
        if there is no tokenizer for `wait_s` seconds, `RequestError` if no reply comes.
        """
        for _ in range(MAX_ASKS):
            try:
                return await self.ask_once(make, wait_s)
            except TokenizerLostError:
                continue
        raise RequestError(
            f"{MAX_ASKS} tokenizers in a row were lost while they worked on this request.",
            status=500,
            code="tokenizer_lost_repeatedly",
        )

    async def ask_once(self, make: Callable[[int], Any], wait_s: float) -> Any:
        """As `ask`, but raises `TokenizerLostError` if the tokenizer is lost meanwhile."""
        await self._wait_up(wait_s)
        call = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self.send(make(call))
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await future
        except TimeoutError as error:
            message = f"The tokenizer didn't answer within {ASK_TIMEOUT_S:.0f} s."
            raise RequestError(message, status=503, code="engine_unavailable") from error
        finally:
            del self._calls[call]

    def answer(self, call: int, reply: Any) -> None:
        """Hand a reply that came to its caller."""
        future = self._calls.get(call)
        if future is not None and not future.done():
            future.set_result(reply)

    def send(self, message: Any) -> None:
        """Send to the tokenizer, if there is one."""
        if self._outbox is None:
            return
        try:
            self._outbox.send(message)
        except EngineDeadError as error:
            if self._broken is not None and not self._broken.done():
                self._broken.set_result(str(error))

    async def _wait_up(self, wait_s: float) -> None:
        if not self._up.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._up.wait()
            except TimeoutError as error:
                raise EngineDeadError("there is no tokenizer") from error

    async def _start_actor(self) -> Any:
        """Start an actor. Returns a reference that resolves when the actor ends."""
        # Without a place it would go to any node, and be lost with that node.
        here = NodeAffinitySchedulingStrategy(this_node(), soft=False)
        actor = RemoteTokenizerActor.options(scheduling_strategy=here)
        self._actor = actor.remote(self._model_path, self._log_format)
        self._process = None
        described = asyncio.wrap_future(self._actor.describe.remote().future())
        async with asyncio.timeout(START_TIMEOUT_S):
            address, self._process = await described
        run = self._actor.run.remote()
        self._outbox = Outbox(address)
        self._broken = asyncio.get_running_loop().create_future()
        self._role_watch = RoleWatch({"the tokenizer": self._actor}, self._hang_timeout_s)
        self._failed_starts = 0
        self.address = address
        self._up.set()
        return run

    async def _keep(self, run: Any) -> None:
        """Start another tokenizer whenever one ends or hangs."""
        while True:
            assert self._role_watch is not None and self._broken is not None
            reason = await _first(_end(run), self._role_watch.run(), self._broken)
            logger.error("tokenizer lost: %s", reason)
            self._lose()
            while not self._up.is_set():
                try:
                    run = await self._start_actor()
                except (RayError, TimeoutError) as error:
                    ray.kill(self._actor)
                    self._failed_starts += 1
                    logger.error("the tokenizer doesn't start: %s", type(error).__name__)
                    await asyncio.sleep(START_PAUSE_S)

    def _lose(self) -> None:
        """Make sure that the tokenizer is dead, and tell all who wait for it."""
        address, self.address = self.address, ""
        self._up.clear()
        self._close_outbox()
        if self._process is not None:
            self._process.kill(self._actor)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(TokenizerLostError())
        self._listener.tokenizer_lost(address)

    def _close_outbox(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


async def _end(run: Any) -> str:
    """Why an actor's `run` is over."""
    try:
        await run
    except asyncio.CancelledError:
        raise
    except Exception as error:  # every death of an actor arrives here, as some exception
        return f"it died: {type(error).__name__}"
    return "it was told to stop"


async def _first(*waits: Coroutine[Any, Any, str] | asyncio.Future[str]) -> str:
    """The result that is there first; the other waits are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
