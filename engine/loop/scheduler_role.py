"""`SchedulerRole`: an `EngineCore` as a server of messages.

engine replicas      --AddRequest, AbortRequest, ReaderGone-->  here
engine replicas      --FlushCache-->  here  --CacheFlushed-->  engine replicas
engine replicas      --PrepareAdapter-->  here  --AdapterPrepared-->  engine replicas
here  --ModelWorkerBatch-->  workers  --GenerationBatchResult-->  here
here  --StepOutputs, one per step-->  each reader (tokenizer)
here  --RequestsDone-->  each owner (engine replica)
replicas  --SubscribeKVEvents-->  here  --KVSnapshot, KVEvents-->  each subscriber (ingress)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from engine.constraints.grammar_compiler import GrammarCompiler
from engine.executor.message_executor import MessageExecutor, ReadyWorkers
from engine.kvcache.kv_publisher import KVPublisher
from engine.loop.engine_core import EngineCore
from engine.protocol.adapters import AdapterPrepared, PrepareAdapter
from engine.protocol.messages import (
    AbortRequest,
    AddRequest,
    CacheFlushed,
    FlushCache,
    ReaderGone,
    RequestsDone,
    Shutdown,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)
from engine.protocol.outboxes import Outboxes
from engine.protocol.transport import Inbox, Waiter
from engine.scheduler.grammar_queue import GrammarQueue
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.trace import StepSpan, TraceRing

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0
WAITING_POLL_S = 0.05
"""Longest sleep while requests wait: their time limits must be noticed soon."""
COMPILING_POLL_S = 0.002
"""Longest sleep while a grammar is being compiled."""


class SchedulerRole:
    """The loop of one engine whose workers are ready; never touches Ray."""

    def __init__(
        self,
        config: SchedulerConfig,
        inbox: Inbox,
        workers: ReadyWorkers,
        results: Inbox,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Requests come from `inbox`, steps' results from `results`; `run` closes both."""
        self.scheduler = Scheduler(config, grammars)
        self._held = GrammarQueue(grammars)
        self._flushes: list[FlushCache] = []
        """Those that wait for the steps in flight."""
        self.inbox = inbox
        self.results = results
        self._workers = workers
        self.last_turn = time.monotonic()
        self.trace: TraceRing[StepSpan] = TraceRing()
        self.stats = SchedulerStats()
        """A copy for other threads: at most 0.1 s old, exact when idle."""
        self._stats_due = 0.0
        self._publisher = KVPublisher(self.scheduler.kv.tree, self._send)
        self._waiter = Waiter(inbox, results)
        self._outboxes = Outboxes()
        self._owners: dict[tuple[str, int], str] = {}
        self._stopping = False

    def run(self, dead: Callable[[], str]) -> None:
        """Serve until `Shutdown`. `dead` names a lost worker; "" if all live.

        Raises `EngineDeadError` if a worker is lost: the engine has to be restarted whole.
        """
        executor = MessageExecutor(self.results, self._workers, dead)
        core = EngineCore(self.scheduler, executor, trace=self.trace)
        try:
            while not self._stopping:
                self._turn(core)
        finally:
            core.shutdown()
            self._outboxes.close()
            self.inbox.close()
            self.results.close()

    def _turn(self, core: EngineCore) -> None:
        """Receive, schedule and launch, process; sleep only if nothing can be done."""
        self.last_turn = time.monotonic()
        self._receive(core)
        if self._flushes:
            self._flush_cache()
        core.launch_ready()
        self._deliver(core)
        if self.last_turn >= self._stats_due or core.scheduler.num_in_flight == 0:
            self._stats_due = self.last_turn + 0.1
            self.stats = core.snapshot_stats()
        self._publisher.publish(self.last_turn, is_idle=not core.scheduler.num_in_flight)
        if self._stopping:
            return
        if core.scheduler.num_in_flight:
            pause = IDLE_POLL_S
            if core.scheduler.launch_at is not None:
                pause = max(core.scheduler.launch_at - time.monotonic(), 0.0)
            ready = self._waiter.wait(min(pause, COMPILING_POLL_S) if self._held else pause)
            if self.results in ready and core.process_one(0.0):
                self._deliver(core)
            elif not ready and not self._held:
                core.process_one(0.0)  # nothing came for a second: this notices a dead worker
        else:
            core.scheduler.on_idle()
            pause = WAITING_POLL_S if core.scheduler.requests.waiting else IDLE_POLL_S
            ready = self._waiter.wait(COMPILING_POLL_S if self._held else pause)
            if self.results in ready:
                core.executor.wait(0.0)  # a report, or a failure

    def _receive(self, core: EngineCore) -> None:
        while (message := self.inbox.recv(0.0)) is not None:
            match message:
                case AddRequest():
                    if message.owner:
                        self._owners[(message.reply_to, message.rid)] = message.owner
                    now = time.monotonic()
                    constraint = message.sequence.params.constraint
                    if constraint is None or not self._held.hold(message, now):
                        core.scheduler.add(message, now)
                case AbortRequest():
                    self._held.drop(message.reply_to, message.rid)
                    core.scheduler.abort(message)
                    self._done([(message.reply_to, message.rid)])
                case ReaderGone():
                    self._drop_reader(message.reply_to)
                case FlushCache():
                    self._flushes.append(message)
                case PrepareAdapter():
                    self._prepare_adapter(message)
                case SubscribeKVEvents():
                    self._publisher.subscribe(message)
                case UnsubscribeKVEvents():
                    self._publisher.unsubscribe(message.reply_to)
                case Shutdown():
                    self._stopping = True
                case _:
                    raise TypeError(f"a scheduler can't take a {type(message).__name__}")
        for request, arrival in self._held.take() if self._held else ():
            core.scheduler.add(request, arrival)

    def _prepare_adapter(self, message: PrepareAdapter) -> None:
        def tell(error: str) -> None:
            self._send(message.reply_to, AdapterPrepared(message.call, error))

        self.scheduler.prepare_adapter(message.adapter, tell)

    def _flush_cache(self) -> None:
        """Empty the prefix cache, unless there are requests. Those that have ended don't count: the
        results of the steps that hold them come soon."""
        requests = self.scheduler.requests.by_key.values()
        num_busy = sum(not req.finished for req in requests) + len(self._held)
        if not num_busy and not self.scheduler.flush_cache():
            return
        refusal = f"{num_busy} requests run or wait" if num_busy else ""
        for message in self._flushes:
            self._send(message.reply_to, CacheFlushed(message.call, refusal))
        self._flushes.clear()

    def _deliver(self, core: EngineCore) -> None:
        for reply_to, out in core.scheduler.take_outputs():
            if out.started:
                out.scheduler = self.inbox.address
            if not self._send(reply_to, out):
                self._drop_reader(reply_to)
            if out.finished:
                self._done([(reply_to, end.rid) for end in out.finished])

    def _done(self, ended: list[tuple[str, int]]) -> None:
        by_owner: dict[str, list[tuple[str, int]]] = {}
        for key in ended:
            owner = self._owners.pop(key, None)
            if owner is not None:
                by_owner.setdefault(owner, []).append(key)
        for owner, keys in by_owner.items():
            self._send(owner, RequestsDone(keys))

    def _drop_reader(self, reply_to: str) -> None:
        logger.warning("reader %s is gone; aborting its requests", reply_to.partition("#")[0])
        self._held.drop(reply_to)
        self.scheduler.abort_reader(reply_to)
        self._done([key for key in self._owners if key[0] == reply_to])
        self._outboxes.drop(reply_to)

    def _send(self, address: str, message: Any) -> bool:
        sent = self._outboxes.send(address, message)
        if not sent:
            self._outboxes.drop(address)
        return sent
