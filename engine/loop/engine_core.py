"""`EngineCore`: the one loop around a `Scheduler` and an `Executor`.

    receive                     scheduler.add and scheduler.abort, by the owner of the core
    launch_ready                compose and send every step that may be in flight, and the masks
                                of delayed samples
    process_one                 wait for the oldest result, commit it
    take_outputs                per reader, to be sent on

Normal, overlap and pipeline modes differ only in how many steps `launch_ready` may send.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from engine.executor.base import Executor
from engine.protocol.messages import StepOutputs
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.stats import SchedulerStats, imbalance
from engine.trace import StepSpan, TraceRing

LOADING_POLL_S = 0.002
"""Sleep of a caller without sockets while nothing runs and an adapter is being read."""


class EngineCore:
    """Drives one engine. It owns the clock and has no sockets."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        trace: TraceRing[StepSpan] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.trace: TraceRing[StepSpan] = trace if trace is not None else TraceRing()
        self._sent: dict[int, tuple[ModelWorkerBatch, float, float]] = {}
        self._committed: list[tuple[GenerationBatchResult, float, float]] = []
        """(result, received, committed) of steps that are traced once their outputs are sent."""

    def launch_ready(self) -> int:
        """Send every step that may be launched now; returns how many were."""
        self._record()
        self._note_adapters()
        count = 0
        while True:
            started = self.clock()
            batch = self.scheduler.next_batch(started)
            for order in self.scheduler.take_orders():
                self.executor.order(order)
            if batch is None:
                return count
            self.executor.launch(batch)
            self._sent[batch.step] = (batch, started, self.clock())
            if batch.delayed_sample:
                self._send_masks()
            count += 1

    def process_one(self, timeout_s: float | None = None) -> bool:
        """Commit the oldest result; False if none is due or it isn't there in time."""
        if self.scheduler.num_in_flight == 0:
            return False
        result = self.executor.wait(timeout_s)
        if result is None:
            return False
        received = self.clock()
        self.scheduler.process_result(result)
        self._send_masks()
        self._committed.append((result, received, self.clock()))
        return True

    def step(self) -> list[tuple[str, StepOutputs]]:
        """One turn of the loop, for callers without sockets. Returns its outputs for each reader.

        An empty list doesn't mean that the engine is idle.
        """
        self.launch_ready()
        launch_at = self.scheduler.launch_at
        timeout_s = None if launch_at is None else max(launch_at - self.clock(), 0.0)
        if not self.process_one(timeout_s) and launch_at is None:
            self.scheduler.on_idle()
            if self.scheduler.adapters is not None and self.scheduler.adapters.is_loading:
                time.sleep(LOADING_POLL_S)
        self._record()
        return self.scheduler.take_outputs()

    def snapshot_stats(self) -> SchedulerStats:
        """A copy of the scheduler's statistics, with what the workers count."""
        by_layer = self.executor.expert_tokens()
        return msgspec.structs.replace(
            self.scheduler.snapshot_stats(),
            expert_tokens_total=by_layer,
            expert_imbalance={layer: imbalance(tokens) for layer, tokens in by_layer.items()},
        )

    def _note_adapters(self) -> None:
        if self.scheduler.adapters is not None:
            for answer in self.executor.take_loaded():
                self.scheduler.adapter_loaded(answer)

    def _send_masks(self) -> None:
        for masks in self.scheduler.take_masks():
            self.executor.sample(masks)

    def _record(self) -> None:
        for result, received, committed in self._committed:
            batch, started, sent = self._sent.pop(result.step)
            drafted, gave = sum(result.num_drafts or ()), result.num_tokens or ()
            accepted = max(sum(gave) - len(gave), 0)
            tokens = len(batch.input_ids)
            if batch.late is not None:
                tokens += len(batch.late.counts) + drafted
            self.trace.add(
                StepSpan(
                    result.step,
                    batch.micro_batch,
                    batch.forward_mode.name.lower(),
                    len(batch.req_pool_indices),
                    tokens,
                    started,
                    sent,
                    received,
                    committed,
                    drafted,
                    accepted,
                )
            )
        self._committed.clear()

    def shutdown(self) -> None:
        """Stop the workers; the core can't be used afterwards."""
        self.executor.shutdown()
