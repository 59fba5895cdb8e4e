"""`SchedulerCalls`: what an engine replica asks its scheduler by message, and waits for."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np

from engine.protocol.adapters import AdapterPrepared, AdapterRef, PrepareAdapter
from engine.protocol.messages import (
    AbortRequest,
    AddRequest,
    CacheFlushed,
    FinishedReq,
    FlushCache,
    StepOutputs,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.transport import Outbox


class SchedulerCalls:
    """Pairs questions with their answers. The replica hands in the answers that it receives."""

    def __init__(self, scheduler: Outbox, address: str) -> None:
        """`address`: the inbox that the scheduler answers to, the replica's."""
        self._scheduler = scheduler
        self._address = address
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def flush_cache(self) -> str:
        """Empty the prefix cache. Returns what kept the scheduler from it; "" if nothing did."""
        number = next(self._numbers)
        answer: CacheFlushed = await self._ask(number, FlushCache(number, self._address))
        return answer.refusal

    async def prepare_adapter(self, adapter: AdapterRef) -> str:
        """Have the workers read an adapter. Returns why they can't; "" if they have it."""
        number = next(self._numbers)
        question = PrepareAdapter(number, self._address, adapter)
        answer: AdapterPrepared = await self._ask(number, question)
        return answer.error

    async def generate_token(self) -> FinishedReq:
        """Run a request of one token through the engine. Returns its end."""
        number = next(self._numbers)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sequence = TokenSequence(np.zeros(1, np.int32), params, "check")
        request = AddRequest(rid=number, reply_to=self._address, sequence=sequence)
        try:
            end: FinishedReq = await self._ask(number, request)
        except asyncio.CancelledError:
            self._scheduler.send(AbortRequest(rid=number, reply_to=self._address))
            raise
        return end

    def answered(self, message: CacheFlushed | AdapterPrepared | StepOutputs) -> None:
        """Take what the scheduler sent. Answers that nobody waits for any more are dropped."""
        match message:
            case CacheFlushed() | AdapterPrepared():
                self._resolve(message.call, message)
            case StepOutputs():
                for end in message.finished:
                    self._resolve(end.rid, end)

    async def _ask(self, number: int, question: FlushCache | PrepareAdapter | AddRequest) -> Any:
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._scheduler.send(question)
            return await future
        finally:
            del self._open[number]

    def _resolve(self, number: int, answer: CacheFlushed | AdapterPrepared | FinishedReq) -> None:
        future = self._open.get(number)
        if future is not None and not future.done():
            future.set_result(answer)
