"""One engine's actors under Ray, without HTTP and Serve: what the engine alone can do.

Requests and outputs are the scheduler's own messages. This process sends and receives them, as a
tokenizer would.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from engine.config import EngineConfig
from engine.protocol.messages import AbortRequest, AddRequest, StepOutputs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.transport import Inbox, Outbox
from engine.scheduler.stats import SchedulerStats
from engine.trace import RoleTrace, unpack

T = TypeVar("T")


@dataclass
class Arrivals:
    """Outputs of a load. Times are monotonic seconds of this process."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Output ids by request."""
    messages: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens in it) of every message."""
    ended: dict[int, tuple[float, str]] = field(default_factory=dict)
    """(time, reason) by request."""


class EngineDriver:
    """SchedulerActor and WorkerActors of one config. Use as a context manager.

    Ray is started for the benchmark and stopped with it.
    """

    def __init__(self, **config: Any) -> None:
        # With Ray's default of 15 the engine would run after all other programs of the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        import ray

        from engine.actors.engine_group import EngineGroup
        from engine.actors.ray_types import node_ip

        if not ray.is_initialized():
            ray.init(include_dashboard=False, logging_level="warning", log_to_driver=False)
        self._loop = asyncio.new_event_loop()
        self._group = EngineGroup(EngineConfig(**config), None, 1)
        self._wait(self._group.start())
        self.inbox = Inbox(node_ip())
        self._scheduler = Outbox(self._group.scheduler_address)
        self._next_rid = 0

    def __enter__(self) -> EngineDriver:
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait(self._group.stop())
        self.inbox.close()
        self._scheduler.close()
        self._loop.close()

    def add(self, prompts: list[np.ndarray], params: list[SamplingParams]) -> list[int]:
        """Send requests; returns their ids."""
        rids = []
        for prompt, sampling in zip(prompts, params, strict=True):
            rid = self._next_rid
            self._next_rid += 1
            self._scheduler.send(
                AddRequest(
                    rid=rid, sequence=TokenSequence(prompt, sampling), reply_to=self.inbox.address
                )
            )
            rids.append(rid)
        return rids

    def collect(self, arrivals: Arrivals, count: int, timeout_s: float = 300.0) -> None:
        """Receive until `count` more requests have ended. Raises `RuntimeError` on an error."""
        goal = len(arrivals.ended) + count
        while len(arrivals.ended) < goal:
            self.receive(arrivals, timeout_s)

    def receive(self, arrivals: Arrivals, timeout_s: float = 300.0) -> list[int]:
        """Take one message. Returns the requests that end with it; raises `RuntimeError` on an
        error."""
        message = self.inbox.recv(timeout_s)
        now = time.monotonic()
        if not isinstance(message, StepOutputs):
            raise RuntimeError(f"no output for {timeout_s:.0f} s")
        arrivals.messages.append((now, len(message.token_ids)))
        rids = np.repeat(message.rids, 1 if message.counts is None else message.counts)
        for rid, token in zip(rids.tolist(), message.token_ids, strict=True):
            arrivals.tokens.setdefault(rid, []).append(token)
        for end in message.finished:
            if end.reason == "error":
                raise RuntimeError(f"request {end.rid} failed: {end.message}")
            arrivals.ended[end.rid] = (now, end.reason)
        return [end.rid for end in message.finished]

    def abort(self, rid: int) -> None:
        """End a request; only output that was already sent still comes."""
        self._scheduler.send(AbortRequest(rid=rid, reply_to=self.inbox.address))

    def stats(self) -> SchedulerStats:
        """Latest statistics of the scheduler."""
        return self._wait(self._group.ping())[1]

    def trace(self, last: int) -> list[RoleTrace]:
        """Spans of the last steps of all roles."""
        return [unpack(role) for role in self._wait(self._group.trace(last))]

    def scheduler_pid(self) -> int:
        """Process id of the scheduler."""
        return self._wait(self._group.scheduler_pid())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)
