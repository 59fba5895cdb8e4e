"""`TpPendingResult`: a step of a model shard between its launch and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.device.clock import StepTiming
from engine.device.queue import Download
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, PromptLogprobs
from engine.sampling.features.logprobs import LogprobTensors
from engine.sampling.sampler import HostTokens, SampledTokens
from engine.worker.base import PendingResult
from engine.worker.speculation import Runs, Speculation, runs_of

_DEVICE_POLL_S = 1e-4


class PromptLogprobTensors(NamedTuple):
    """Log-probabilities of a chunk whose request asked for them."""

    line: int
    start: int
    """Position in the prompt of the chunk's first token."""
    logprobs: LogprobTensors


@dataclass
class TpPendingResult(PendingResult):
    """A step whose kernels are launched."""

    batch: ModelWorkerBatch
    sampled: SampledTokens
    prompt_logprobs: list[PromptLogprobTensors]
    has_embeddings: bool
    download: Download
    """The tensors of `result_tensors`, on their way to the host."""
    timing: StepTiming
    note_spans: Callable[[], None]
    speculation: Speculation | None = None

    @property
    def step(self) -> int:
        return self.batch.step

    def seconds_left(self) -> float:
        return 0.0 if self.download.is_done() else _DEVICE_POLL_S

    @cached_property
    def _tensors(self) -> Iterator[Tensor]:
        return iter(self.download.wait())

    @cached_property
    def _host(self) -> HostTokens:
        return _on_host(self.sampled, self._tensors).to_host()

    @cached_property
    def _runs(self) -> Runs:
        return runs_of(self.batch, self._host)

    def runs(self) -> Runs:
        """The tokens of each line. Waits for the device."""
        return self._runs

    def collect(self) -> GenerationBatchResult:
        host, counts = self._host, None
        tokens, logprobs = host.next_token_ids.tolist(), host.logprobs
        failed = np.flatnonzero(host.is_nan).tolist()
        if host.num_kept is not None:
            runs = self._runs
            tokens, logprobs = runs.flat, runs.logprobs
            failed, counts = runs.failed, [len(run) for run in runs.tokens]
        text = "the model produced NaN or no allowed token for this request"
        prompt = [
            PromptLogprobs(line, start, list(_logprobs_on_host(logprobs, self._tensors).to_host()))
            for line, start, logprobs in self.prompt_logprobs
        ]
        embeddings = _as_bytes(next(self._tensors)) if self.has_embeddings else None
        drafts = None
        if self.speculation is not None:
            self.speculation.learn(self.step)
            drafts = self.speculation.next_drafts(self.batch)
        self.download.release()
        self.note_spans()
        started_at, ended_at = self.timing.span()
        period_s = None
        if self.speculation is not None:
            period_s = self.speculation.period_s(started_at, ended_at)
        return GenerationBatchResult(
            step=self.step,
            next_token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt or None,
            line_errors=dict.fromkeys(failed, text) or None,
            device_s=ended_at - started_at,
            period_s=period_s,
            embeddings=embeddings,
            num_tokens=counts,
            num_drafts=None if counts is None else (self.batch.run_lens - 1).tolist(),
            drafts=drafts,
        )


def _as_bytes(embeddings: Tensor) -> list[bytes]:
    """Each row of float32 [E, hidden], on the host, as results carry it."""
    finite = embeddings.isfinite().all(dim=1).tolist()
    rows = embeddings.numpy().astype("<f4", copy=False)
    return [row.tobytes() if ok else b"" for row, ok in zip(rows, finite, strict=True)]


def result_tensors(
    sampled: SampledTokens, prompt: list[PromptLogprobTensors], embeddings: Tensor | None
) -> list[Tensor]:
    tensors = [sampled.next_token_ids, sampled.is_nan]
    tensors += [] if sampled.num_kept is None else [sampled.num_kept]
    logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
    for found in logprobs + [item.logprobs for item in prompt]:
        tensors += [found.token, found.top_ids, found.top]
        tensors += [] if found.rank is None else [found.rank]
    return tensors if embeddings is None else [*tensors, embeddings]


def _on_host(sampled: SampledTokens, tensors: Iterator[Tensor]) -> SampledTokens:
    """`sampled` with its tensors replaced by the next of `tensors`, made by `_result_tensors`."""
    ids, is_nan = next(tensors), next(tensors)
    num_kept = None if sampled.num_kept is None else next(tensors)
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = _logprobs_on_host(logprobs, tensors)
    return SampledTokens(ids, is_nan, logprobs, sampled.logprob_lines, num_kept)


def _logprobs_on_host(logprobs: LogprobTensors, tensors: Iterator[Tensor]) -> LogprobTensors:
    token, top_ids, top = next(tensors), next(tensors), next(tensors)
    rank = None if logprobs.rank is None else next(tensors)
    return LogprobTensors(token, top_ids, top, logprobs.num_top, rank)
