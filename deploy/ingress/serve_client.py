"""`ServeEngineClient`: the engine behind Ray Serve, as the HTTP layer sees it.

Text and tokens travel by message, through the tokenizer actor. Each request also has one unary
Serve call to an engine replica, which lasts as long as the request. If the tokenizer or the replica
is lost, the request is resumed (`deploy.ingress.resume`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from deploy.http.engine_client import (
    EngineClient,
    EngineHealth,
    EngineStatus,
    IngressReports,
    ModelInfo,
    PlainFamily,
    SpendingReport,
)
from deploy.ingress.adapter_board import AdapterBoard, HeadStore
from deploy.ingress.attempt import Attempts
from deploy.ingress.engine_watch import EngineWatch
from deploy.ingress.listener import IngressListener
from deploy.ingress.metrics_exchange import MetricsExchange
from deploy.ingress.replica_board import ReplicaBoard
from deploy.ingress.replica_router import ReplicaRouter
from deploy.ingress.resume import RESUMED, AttemptLostError, Loss, Progress, ResumeLimits
from deploy.ingress.tokenizer_link import TokenizerLink
from deploy.options import ENGINE, ServerOptions
from deploy.routing import make_policy
from deploy.routing.adapter_book import AdapterBook
from deploy.serve_state.drain_watch import DrainWatch
from deploy.serve_state.replica_states import ServeStates, replicas_lost
from engine.actors.ray_types import node_ip
from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.constraints import ConstraintSpec
from engine.constraints.guard import GrammarGuard
from engine.errors import ConfigError, EngineDeadError, RequestError
from engine.protocol import tokenizer_messages as tm
from engine.protocol.async_inbox import AsyncInbox
from engine.protocol.encoding import encode_inline
from engine.protocol.messages import IngressMetrics, KVEvents, KVSnapshot, Pong, RequestTaken
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import TextDelta
from engine.trace import RoleTrace, unpack

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 120.0
"""An engine replica has this time to read an adapter that is loaded by hand."""
HEALTH_TIMEOUT_S = 0.8
"""A replica counts as unwell if it doesn't say in this time that it is well."""


HASHES_EVERY_TOKENS = 16
"""The index of cached pages keeps about one hash for this many tokens, even if pages are small."""


@dataclass(frozen=True)
class IngressOptions:
    """What an ingress must know of a model that it serves."""

    server: ServerOptions
    info: ModelInfo
    routing_policy: str = ""
    """How replicas are chosen; "" leaves it to Serve."""
    deployment: str = ENGINE
    """Of its engines."""


class ServeEngineClient(EngineClient, IngressListener):
    """One per ingress replica and model; owns its tokenizer actor."""

    def __init__(self, engines: Any, ingresses: Any, options: IngressOptions) -> None:
        """`engines` and `ingresses` are Serve's handles. Use `create`, which also starts the
        parts."""
        super().__init__()
        self._server = server = options.server
        self._engines = engines
        self._ingresses = ingresses
        self._resume = ResumeLimits(server.resume_wait_s, server.max_resumes)
        resolved = options.info.resolved.here()
        self._info = replace(
            options.info,
            resolved=resolved,
            created=int(time.time()),
            adapters=AdapterCatalog.of(resolved.engine),
        )
        self._adapters: AdapterBoard | None = None
        """Set if adapters may be loaded by hand."""
        if self._info.adapters is not None and self._info.adapters.loads:
            application = serve.get_replica_context().app_name
            names = application, self._info.name, resolved.engine.model
            self._adapters = AdapterBoard(self._info.adapters, *names, HeadStore())
        self._resumes: Counter[str] = Counter(dict.fromkeys(RESUMED, 0))
        self._drain = DrainWatch()
        self._inbox = AsyncInbox(node_ip(), self._on_message)
        model_path = str(resolved.model.path)
        hang_timeout_s, address = server.hang_timeout_s, self._inbox.address
        self._tokenizer = TokenizerLink(model_path, hang_timeout_s, self, server.log_format)
        self._watch = EngineWatch(engines, address, hang_timeout_s, self)
        self._router = _make_router(options, address, self._watch)
        self._attempts = Attempts(self._tokenizer, engines, self._watch, address, self._router)
        self._exchange = MetricsExchange(ingresses, address)
        self._serve_states = ServeStates(options.deployment)
        self._board = ReplicaBoard(self._ask_engines, self._watch, self._serve_states)
        self._guard = GrammarGuard(model_path)
        self._leaving: asyncio.Task[None] | None = None

    @classmethod
    async def create(
        cls, engines: Any, ingresses: Any, options: IngressOptions
    ) -> ServeEngineClient:
        """Make the client of a model and start it. Raises the error that keeps the tokenizer
        from starting."""
        client = cls(engines, ingresses, options)
        try:
            await client._tokenizer.start()
        except BaseException:
            client.stop()
            raise
        await client.refresh_adapters()
        client._watch.start()
        loop = asyncio.get_running_loop()
        client._leaving = loop.create_task(client._end_streams_in_time())
        return client

    def stop(self) -> None:
        """Stop the tokenizer, the grammar guard and the watch, and close the inbox."""
        if self._leaving is not None:
            self._leaving.cancel()
        self._watch.close()
        self._tokenizer.stop()
        self._guard.shutdown()
        self._exchange.close()
        self._inbox.close()

    def check(self) -> None:
        """Serve's health checks call this. Raises `EngineDeadError` if no tokenizer can start."""
        self._drain.asked()
        self._tokenizer.check()

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    @property
    def ingress(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    @property
    def resumes(self) -> Mapping[str, int]:
        return self._resumes

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        reply = await self._tokenizer.ask(
            lambda call: tm.EncodeRequest(call, self._inbox.address, texts, add_special_tokens),
            self._resume.wait_s,
        )
        return _ids(reply)

    async def decode(self, token_ids: list[int]) -> str:
        reply = await self._tokenizer.ask(
            lambda call: tm.DecodeRequest(call, self._inbox.address, token_ids),
            self._resume.wait_s,
        )
        return str(reply.text)

    async def decode_each(self, token_ids: list[int]) -> list[str]:
        reply = await self._tokenizer.ask(
            lambda call: tm.DecodeRequest(call, self._inbox.address, token_ids, each=True),
            self._resume.wait_s,
        )
        return list(reply.texts)

    async def render_chat(self, chat: tm.Conversation) -> list[int]:
        reply = await self._tokenizer.ask(
            lambda call: tm.ChatRequest(call, self._inbox.address, chat), self._resume.wait_s
        )
        return _ids(reply)[0]

    async def check_constraint(self, spec: ConstraintSpec) -> None:
        await asyncio.wrap_future(self._guard.submit(spec))

    async def generate(
        self,
        sequence: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        progress = Progress(sequence, self._resume, self._resumes, known_ids=known_ids)
        await self._attempts.generate(progress, read)

    async def abort(self, request_id: str | None, owner: str | None) -> None:
        answers = await _ask_all(self._ingresses, "abort", ANSWER_TIMEOUT_S, request_id, owner)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if failed:
            raise EngineDeadError(f"an ingress can't abort requests: {failed[0]}")

    async def tell_spending(self, ingress: str, report: SpendingReport) -> None:
        await _ask_all(self._ingresses, "hear_spending", ANSWER_TIMEOUT_S, ingress, report)

    async def flush_cache(self) -> list[str]:
        return _complaints(await self._ask_engines("flush_cache", ANSWER_TIMEOUT_S))

    async def refresh_adapters(self) -> None:
        """Learn which adapters were loaded by hand."""
        if self._adapters is not None:
            await asyncio.to_thread(self._adapters.refresh)

    def _board_to_change(self) -> AdapterBoard:
        if self._adapters is None:
            raise RequestError(
                "this server loads no adapters: set lora_load_folders to the folders that they may "
                "lie in",
                status=403,
            )
        return self._adapters

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> list[str]:
        board = self._board_to_change()
        catalog = board.catalog
        if name == self._info.name or (name in catalog.loaded and not replace):
            raise RequestError(
                f"'{name}' is served already; unload it, or set load_inplace", "lora_name"
            )
        try:
            catalog.check_name(name)
        except ConfigError as error:
            raise RequestError(str(error), "lora_name") from error
        try:
            ref = await asyncio.to_thread(catalog.take, name, path)
        except ConfigError as error:
            raise RequestError(str(error), "lora_path") from error
        asked = await self._ask_engines("load_adapter", LOAD_TIMEOUT_S, encode_inline(ref))
        refusals = [reply[1] for reply in asked if isinstance(reply, tuple) and reply[1]]
        if refusals:  # it is the same on all
            raise RequestError(refusals[0], "lora_path")
        await asyncio.to_thread(board.add, ref)
        await _ask_all(self._ingresses, "hear_adapters", ANSWER_TIMEOUT_S)
        return _complaints([reply for reply in asked if isinstance(reply, BaseException)])

    async def unload_adapter(self, name: str) -> None:
        board = self._board_to_change()
        if name not in board.catalog.loaded:
            raise RequestError(
                f"there is no adapter '{name[:200]}' that was loaded", "lora_name", status=404
            )
        await asyncio.to_thread(board.remove, name)
        await _ask_all(self._ingresses, "hear_adapters", ANSWER_TIMEOUT_S)

    async def check_generate(self, timeout_s: float) -> EngineHealth:
        health = await self.health()
        if not health.ok:
            return health
        limit_s = timeout_s + ANSWER_TIMEOUT_S
        try:
            replies = await self._ask_engines("check_generate", limit_s, timeout_s)
        except Exception as error:
            return EngineHealth(False, f"{type(error).__name__}: {str(error)[:300]}")
        detail = "; ".join(_complaints(replies))
        return EngineHealth(not detail, detail)

    async def health(self) -> EngineHealth:
        try:
            replies = await self._ask_engines("health", HEALTH_TIMEOUT_S)
        except Exception as error:  # any failure is answered with "not healthy" and its reason
            return EngineHealth(False, f"{type(error).__name__}: {str(error)[:300]}")
        lost = await self._replicas_lost(len(replies))
        wrong = [self._tokenizer.unwell, lost, *_complaints(replies)]
        detail = "; ".join(filter(None, wrong))
        return EngineHealth(not detail, detail)

    async def _replicas_lost(self, num_engines: int) -> str:
        """What Serve knows to be lost, besides the replicas that have just answered. Requests need
        no controller: while it is gone or slow, health is what the engines say, and as many of
        them as have been heard."""
        try:
            deployments = await self._serve_states.ask(HEALTH_TIMEOUT_S)
        except Exception as error:  # of Serve's or Ray's; not one of what serves
            logger.debug("Serve's controller doesn't answer: %s", type(error).__name__)
            quiet = [name for name, heard in self._watch.actors.items() if not heard]
            return "; ".join(f"{name} is silent" for name in quiet)
        return replicas_lost(deployments, num_engines, self._serve_states.engine)

    async def stats(self) -> list[dict[str, float]]:
        answers = await self._ask_engines("stats", ANSWER_TIMEOUT_S)
        return [r for r in answers if not isinstance(r, BaseException)]

    async def ingress_metrics(self, timeout_s: float) -> IngressReports:
        return await self._exchange.gather(timeout_s)

    def tell_metrics(self, asker: str, number: int, report: list[PlainFamily]) -> str:
        """Send what this ingress measured to the inbox `asker`. Returns this ingress' name."""
        self._exchange.answer(asker, number, self.ingress, report)
        return self.ingress

    async def trace(self, last: int) -> dict[str, list[RoleTrace]]:
        answers = await self._ask_engines("trace", ANSWER_TIMEOUT_S, last)
        replicas = dict(a for a in answers if not isinstance(a, BaseException))
        return {name: [unpack(role) for role in roles] for name, roles in replicas.items()}

    async def server_info(self) -> dict[str, Any]:
        answers = await self._ask_engines("describe", ANSWER_TIMEOUT_S)
        replicas = [answer for answer in answers if not isinstance(answer, BaseException)]
        return {**self._server.model_dump(), "replicas": replicas}

    async def engine_status(self) -> EngineStatus:
        target, replicas = await self._board.look()
        return EngineStatus(target, replicas, self._tokenizer.unwell)

    async def _ask_engines(self, method: str, timeout_s: float, *args: Any) -> list[Any]:
        return await _ask_all(self._engines, method, timeout_s, *args)

    def _on_message(self, message: Any) -> None:
        match message:
            case tm.TextOutputs():
                self._attempts.deliver(message.deltas)
            case RequestTaken():
                self._watch.heard(message.replica)
                self._attempts.taken(message.rid, message.replica)
            case Pong():
                self._watch.heard(message.replica, message)
            case KVEvents() if self._router is not None:
                self._router.take_events(message)
            case KVSnapshot() if self._router is not None:
                self._router.take_snapshot(message)
            case IngressMetrics():
                self._exchange.take(message)
            case tm.EncodeReply() | tm.DecodeReply() | tm.Registered():
                self._tokenizer.answer(message.call, message)

    def replica_alive(self, pong: Pong) -> None:
        if self._router is not None:
            self._router.appeared(pong)

    def replica_lost(self, replica: str) -> None:
        if self._router is not None:
            self._router.vanished(replica)
        self._attempts.replica_lost(replica, is_last=not self._watch.actors)

    def tokenizer_lost(self, address: str) -> None:
        self._watch.reader_gone(address)
        self._attempts.fail_all(AttemptLostError(Loss.TOKENIZER, "it was lost"))

    async def _end_streams_in_time(self) -> None:
        """When this process is stopped: give streams that don't end in time an error, not a cut."""
        await self._drain.wait(self._server.drain_timeout_s)
        self._attempts.fail_all(
            RequestError("The server is being stopped.", status=503, code="server_stopping")
        )


def _make_router(options: IngressOptions, address: str, watch: EngineWatch) -> ReplicaRouter | None:
    if not options.routing_policy:
        return None
    page_size = options.info.resolved.engine.page_size
    policy = make_policy(
        options.routing_policy,
        time.monotonic,
        sample_every=max(1, HASHES_EVERY_TOKENS // page_size),
    )
    engine = options.info.resolved.engine
    policy.adapters = AdapterBook(engine.max_loras, engine.max_held_loras)
    return ReplicaRouter(policy, page_size, address, watch)


async def _ask_all(handle: Any, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Answers of every replica of a deployment; where a call fails, its exception instead. Raises
    `EngineDeadError` if a replica doesn't answer or there is none."""
    asked = handle.broadcast(method, *args)
    try:
        answers: list[Any] = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
    except (TimeoutError, RayServeException) as error:
        raise EngineDeadError(f"no answer to {method}: {type(error).__name__}") from error
    return answers


def _complaints(replies: list[Any]) -> list[str]:
    """What is wrong, of (replica, what is wrong) or the error instead of it."""
    wrong = []
    for reply in replies:
        if isinstance(reply, BaseException):
            wrong.append(str(reply).strip().splitlines()[-1])
        elif reply[1]:
            wrong.append(f"replica {reply[0]}: {reply[1]}")
    return wrong


def _ids(reply: tm.EncodeReply) -> list[list[int]]:
    if reply.error:
        raise RequestError(reply.error, reply.param)
    return reply.ids
