"""`MessageExecutor`: workers behind sockets, whoever started them."""

from __future__ import annotations

from collections.abc import Callable

from engine import messages
from engine.errors import EngineDeadError
from engine.executor import Executor
from engine.messages import GenerationBatchResult, ModelWorkerBatch, SampleMasks, WorkerReady
from engine.transport import Inbox, Outbox

READY_TIMEOUT_S = 600.0


class MessageExecutor(Executor):
    """Workers behind sockets: plans are encoded once and sent to each."""

    def __init__(self, results: Inbox, workers: list[str], alive: Callable[[], str]) -> None:
        """`workers`: inbox addresses in rank order. `alive` says who died, or ""."""
        self.results = results
        self.outboxes = [Outbox(address) for address in workers]
        self._alive = alive

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
            dead = self._alive()
            if dead:
                raise EngineDeadError(dead)
            waited += slice_s
            if timeout_s is not None and waited >= timeout_s:
                return None

    def _send(self, message: ModelWorkerBatch | SampleMasks) -> None:
        frames = messages.encode(message)
        for outbox in self.outboxes:
            outbox.send_frames(type(message), frames)

    def shutdown(self) -> None:
        for outbox in self.outboxes:
            outbox.send(messages.Shutdown())
            outbox.close()


def collect_ready(results: Inbox, world_size: int, dead: Callable[[], str]) -> list[str]:
    """Inbox addresses of all ranks, in rank order. Raises `EngineDeadError` if one fails."""
    addresses: dict[int, str] = {}
    waited = 0.0
    while len(addresses) < world_size:
        message = results.recv(0.5)
        if isinstance(message, WorkerReady):
            if message.error:
                raise EngineDeadError(f"worker {message.rank} can't start: {message.error}")
            addresses[message.rank] = message.address
            continue
        waited += 0.5
        lost = dead()
        if lost:
            raise EngineDeadError(f"while starting: {lost}")
        if waited > READY_TIMEOUT_S:
            raise EngineDeadError(f"workers not ready after {READY_TIMEOUT_S:.0f} s")
    return [addresses[rank] for rank in range(world_size)]
