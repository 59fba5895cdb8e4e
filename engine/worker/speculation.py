"""A worker's side of speculative decoding: runs of tokens, and what its `StepFiller` learns."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from engine.attention.forward_batch import ForwardBatch
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.protocol.step import ModelWorkerBatch, TokenLogprobs
from engine.sampling.sampler import HostTokens, Sampler
from engine.speculative.drafter import Drafter, make_drafter
from engine.speculative.step_filler import StepFiller
from engine.worker.draft_model import DraftTarget
from engine.worker.model_runner import ModelRunner

MAX_HOST_S = 1e-3
"""What the host does between two steps takes less than a step and this."""


class Runs(NamedTuple):
    """The tokens of a step, of its S lines that sample."""

    tokens: list[list[int]]
    """[S]: what each line gave. One that failed gave what came before the token that failed."""
    failed: list[int]
    """Lines that failed."""
    logprobs: list[TokenLogprobs | None] | None
    """Of all these tokens, if a line asked for them."""

    @property
    def flat(self) -> list[int]:
        """All tokens, line after line."""
        return [token for run in self.tokens for token in run]


def runs_of(batch: ModelWorkerBatch, host: HostTokens) -> Runs:
    """The runs of a complete step."""
    tokens = host.next_token_ids.tolist()
    bad = np.flatnonzero(host.is_nan).tolist()
    if host.num_kept is None:
        failed = set(bad)
        single = [[] if i in failed else [token] for i, token in enumerate(tokens)]
        return Runs(single, bad, host.logprobs)
    runs: list[list[int]] = []
    failed_lines: list[int] = []
    logprobs: list[TokenLogprobs | None] | None = None if host.logprobs is None else []
    counts, nan_at = batch.run_lens.tolist(), set(bad)
    start = 0
    for line, (count, kept) in enumerate(zip(counts, host.num_kept.tolist(), strict=True)):
        end = start + kept
        if nan_at and (found := nan_at.intersection(range(start, end))):
            failed_lines.append(line)
            end = min(found)
        runs.append(tokens[start:end])
        if logprobs is not None:
            assert host.logprobs is not None
            logprobs += host.logprobs[start:end]
        start += count
    return Runs(runs, failed_lines, logprobs)


class Sampled(Protocol):
    """A step that was sampled."""

    @property
    def step(self) -> int:
        """Its number."""

    def runs(self) -> Runs:
        """Its tokens. Waits for the device."""


class _Unlearned(NamedTuple):
    batch: ModelWorkerBatch
    owners: list[int]
    sampled: Sampled


class Speculation:
    """Hands the tokens of sampled steps to the filler, in the order of the steps."""

    def __init__(self, drafter: Drafter, filler: StepFiller) -> None:
        self._drafter = drafter
        self._filler = filler
        self._unlearned: deque[_Unlearned] = deque()
        self._ended_at = 0.0

    def begin(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """Take note of a step's new requests; the step with everything in it."""
        if batch.late is not None or batch.new_rows:
            self.learn()  # drafters see tokens and requests in the order of the steps, on all ranks
        self._filler.install(batch.new_rows)
        return self._filler.fill(batch)

    def ran(self, batch: ModelWorkerBatch, forward: ForwardBatch) -> None:
        """The target's forward of a complete step is launched."""
        self._drafter.prefill(batch, forward)

    def note(self, batch: ModelWorkerBatch, sampled: Sampled) -> None:
        """A complete step was sampled."""
        self._unlearned.append(_Unlearned(batch, self._filler.owners(batch), sampled))

    def learn(self, up_to: int | None = None) -> None:
        """Take the tokens of the steps sampled so far (`up_to`: of those up to this step). Steps
        of other micro-batches may have overtaken one that waited for its masks."""
        later: deque[_Unlearned] = deque()
        while self._unlearned:
            batch, owners, sampled = entry = self._unlearned.popleft()
            if up_to is not None and sampled.step > up_to:
                later.append(entry)
                continue
            self._filler.record(batch, owners, sampled.runs().tokens)
        self._unlearned = later

    def period_s(self, started_at: float, ended_at: float) -> float:
        """Seconds of the stage's time that a step took which ran from `started_at` to `ended_at`,
        counted from the end of the step before, unless the stage had nothing to do in between."""
        device_s, before = ended_at - started_at, started_at - self._ended_at
        self._ended_at = ended_at
        return device_s + (before if 0.0 < before < device_s + MAX_HOST_S else 0.0)

    def next_drafts(self, batch: ModelWorkerBatch) -> list[list[int]] | None:
        """Drafts for the sampled lines' next steps, if the step asked for any. Call `learn`
        before."""
        if not batch.drafts_wanted:
            return None
        rows = batch.req_pool_indices[batch.sampled_lines].tolist()
        return self._filler.propose(rows, [batch.drafts_wanted] * len(rows))


def make_speculation(
    config: WorkerConfig, parallel: ParallelState, runner: ModelRunner, sampler: Sampler
) -> Speculation:
    """What a rank of the last stage needs for `speculative_config`. `runner` and `sampler` are its
    own. Raises `ConfigError` if the drafter can't be made."""
    speculative = config.engine.speculative_config
    assert speculative is not None
    drafter = make_drafter(speculative)
    drafter.attach(DraftTarget(config, runner, sampler))
    filler = StepFiller(
        drafter,
        config.engine.max_running_requests + 1,
        parallel.check_equal if parallel.tp_size > 1 else None,
    )
    return Speculation(drafter, filler)
