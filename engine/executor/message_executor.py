"""`MessageExecutor`: workers behind sockets, for any way of starting them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.errors import EngineDeadError
from engine.executor.base import Executor
from engine.protocol import encoding, messages
from engine.protocol.adapters import AdapterLoaded, DropAdapter, LoadAdapter
from engine.protocol.messages import ExpertTokens, WorkerReady
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.protocol.transport import Inbox, Outbox

READY_TIMEOUT_S = 1800.0


class ReadyWorkers(NamedTuple):
    """What all ranks reported when they were ready."""

    addresses: list[str]
    """Addresses of their inboxes, in rank order."""
    num_kv_tokens: int
    """Size in tokens of the KV cache; every rank has room for it."""


class MessageExecutor(Executor):
    """Workers behind sockets. A step's message is encoded once and sent to each worker."""

    def __init__(self, results: Inbox, workers: ReadyWorkers, dead: Callable[[], str]) -> None:
        """Takes steps' results from `results`. `dead` names a lost worker, or "" if all live."""
        self.results = results
        self.num_kv_tokens = workers.num_kv_tokens
        self.outboxes = [Outbox(address) for address in workers.addresses]
        self._lost = dead
        self._expert_tokens: dict[int, list[int]] = {}
        self._answers: dict[str, list[AdapterLoaded]] = {}
        """By digest of an adapter that is being read: of the ranks that have answered."""
        self._loaded: list[AdapterLoaded] = []

    def launch(self, batch: ModelWorkerBatch) -> None:
        self._send(batch)

    def sample(self, masks: SampleMasks) -> None:
        self._send(masks)

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        waited = 0.0
        while True:
            slice_s = 1.0 if timeout_s is None else min(1.0, timeout_s - waited)
            result = self.results.recv(slice_s)
            if isinstance(result, GenerationBatchResult):
                if result.error is not None:
                    raise EngineDeadError(f"a worker failed: {result.error}")
                return result
            if isinstance(result, ExpertTokens):
                self._expert_tokens |= result.by_layer
                continue
            if isinstance(result, AdapterLoaded):
                self._note(result)
                if timeout_s is None:
                    continue
                return None  # a request may run now
            lost = self._lost()
            if lost:
                raise EngineDeadError(lost)
            waited += slice_s
            if timeout_s is not None and waited >= timeout_s:
                return None

    def expert_tokens(self) -> dict[int, list[int]]:
        """Of the last reports, which come once a second while steps run, and once behind them."""
        return dict(self._expert_tokens)

    def order(self, message: LoadAdapter | DropAdapter) -> None:
        self._send(message)

    def take_loaded(self) -> list[AdapterLoaded]:
        found, self._loaded = self._loaded, []
        return found

    def _note(self, answer: AdapterLoaded) -> None:
        answers = self._answers.setdefault(answer.digest, [])
        answers.append(answer)
        if len(answers) == len(self.outboxes):
            del self._answers[answer.digest]
            failed = [one for one in answers if one.error]
            self._loaded.append(failed[0] if failed else answer)

    def _send(self, message: ModelWorkerBatch | SampleMasks | LoadAdapter | DropAdapter) -> None:
        frames = encoding.encode(message)
        for outbox in self.outboxes:
            outbox.send_frames(type(message), frames)

    def shutdown(self) -> None:
        for outbox in self.outboxes:
            outbox.send(messages.Shutdown())
            outbox.close()


def collect_ready(results: Inbox, world_size: int, dead: Callable[[], str]) -> ReadyWorkers:
    """Wait until all ranks are ready. Raises `EngineDeadError` if one fails."""
    ready: dict[int, WorkerReady] = {}
    waited = 0.0
    while len(ready) < world_size:
        message = results.recv(0.5)
        if isinstance(message, WorkerReady):
            if message.error:
                raise EngineDeadError(f"worker {message.rank} can't start: {message.error}")
            ready[message.rank] = message
            continue
        waited += 0.5
        lost = dead()
        if lost:
            raise EngineDeadError(f"while starting: {lost}")
        if waited > READY_TIMEOUT_S:
            raise EngineDeadError(f"workers not ready after {READY_TIMEOUT_S:.0f} s")
    addresses = [ready[rank].address for rank in range(world_size)]
    return ReadyWorkers(addresses, min(message.num_kv_tokens for message in ready.values()))
