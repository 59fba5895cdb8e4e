"""`StepQueue`: the steps that a worker holds, from their message to their result.

    batch                         -> forward -> sample -> result
    batch with a delayed sample   -> forward -> (its SampleMasks) -> sample -> result

Forwards are launched in the order of the messages. Only a batch that needs the token of a delayed
sample waits for the masks; others overtake it. Results of a micro-batch come out in the order of
its steps.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.worker.base import LaunchedForward, ModelWorker, PendingResult


class StepQueue:
    """Drives one `ModelWorker`. It has no sockets."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self._unsampled: dict[int, LaunchedForward] = {}
        """By step: delayed samples whose masks haven't come."""
        self._deferred: deque[ModelWorkerBatch] = deque()
        """Batches behind a delayed sample, in order."""
        self._early: dict[int, SampleMasks] = {}
        """By step: masks of deferred batches."""
        self._launched: dict[int, tuple[int, PendingResult | None]] = {}
        """By step, in order: the micro-batch, and the result (None until the step is sampled)."""

    def launch(self, batch: ModelWorkerBatch) -> None:
        """Start a step now, or as soon as the masks that it depends on are here."""
        if self._deferred or self._depends_on_unsampled(batch):
            self._deferred.append(batch)
        else:
            self._run(batch)

    def apply(self, masks: SampleMasks) -> None:
        """Sample a delayed step, and start the batches that waited for it."""
        forwarded = self._unsampled.pop(masks.step, None)
        if forwarded is None:
            if all(batch.step != masks.step for batch in self._deferred):
                return  # a stage that doesn't sample
            self._early[masks.step] = masks
            return
        self._sample(forwarded, masks)
        while self._deferred and not self._depends_on_unsampled(self._deferred[0]):
            self._run(self._deferred.popleft())

    def take_ready(self) -> list[GenerationBatchResult]:
        """Results that the device is done with, in order within each micro-batch."""
        ready: list[GenerationBatchResult] = []
        blocked: set[int] = set()
        for step, (micro_batch, pending) in list(self._launched.items()):
            if micro_batch in blocked:
                continue
            if pending is None or pending.seconds_left() > 0.0:
                blocked.add(micro_batch)
                continue
            del self._launched[step]
            ready.append(pending.collect())
        return ready

    def take_oldest(self) -> GenerationBatchResult | None:
        """Wait for the oldest result that may come out; None if there is none."""
        blocked: set[int] = set()
        for step, (micro_batch, pending) in self._launched.items():
            if pending is None:
                blocked.add(micro_batch)
            elif micro_batch not in blocked:
                del self._launched[step]
                return pending.collect()
        return None

    def seconds_left(self) -> float | None:
        """Seconds until the next result may be ready; None if that depends on a message."""
        waits = [p.seconds_left() for _, p in self._launched.values() if p is not None]
        return min(waits, default=None)

    def _run(self, batch: ModelWorkerBatch) -> None:
        forwarded = self.worker.forward(batch)
        if forwarded is None:
            return
        if not batch.delayed_sample:
            self._launched[batch.step] = (batch.micro_batch, forwarded.sample(None))
            return
        self._launched[batch.step] = (batch.micro_batch, None)
        masks = self._early.pop(batch.step, None)
        if masks is not None:
            self._sample(forwarded, masks)
        else:
            self._unsampled[batch.step] = forwarded

    def _sample(self, forwarded: LaunchedForward, masks: SampleMasks) -> None:
        batch = forwarded.batch
        self._launched[batch.step] = (batch.micro_batch, forwarded.sample(masks))

    def _depends_on_unsampled(self, batch: ModelWorkerBatch) -> bool:
        """Whether a row of `batch` continues a request whose last token isn't sampled yet."""
        if not self._unsampled:
            return False
        rows = batch.req_pool_indices
        return any(
            np.isin(f.batch.req_pool_indices[f.batch.sampled_lines], rows).any()
            for f in self._unsampled.values()
        )
