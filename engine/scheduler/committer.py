"""`Committer`: what a step's result means for its requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.protocol.messages import (
    GenerationBatchResult,
    TokenLogprobs,
    VerifiedRows,
)
from engine.scheduler.delayed_sample import DelayedSamples
from engine.scheduler.micro_batch import LaunchedStep, MicroBatch
from engine.scheduler.outputs import OutputCollector
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.requests import Requests
from engine.scheduler.stats import SchedulerStats


class _Run(NamedTuple):
    """The tokens that a row gave, and their log-probabilities."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    num_drafted: int


class Committer:
    """Adds tokens to requests, ends those that are complete, and tells the readers."""

    def __init__(
        self,
        requests: Requests,
        outputs: OutputCollector,
        delayed: DelayedSamples,
        stats: SchedulerStats,
    ) -> None:
        self._requests = requests
        self._outputs = outputs
        self._delayed = delayed
        self._stats = stats

    def commit(self, mb: MicroBatch, step: LaunchedStep, result: GenerationBatchResult) -> None:
        """Take the tokens of `step`, the oldest step of `mb` in flight."""
        if result.verified is None:
            ended = self._commit_tokens(step, result)
        else:
            ended = self._commit_runs(mb, step, result, result.verified)
        if result.drafts is not None:
            for req, drafts in zip(step.sampled, result.drafts, strict=True):
                req.drafts = drafts
        if ended:
            mb.running.remove(ended)
            for req in ended:
                self._requests.let_go(req)

    def _commit_tokens(self, step: LaunchedStep, result: GenerationBatchResult) -> list[Req]:
        """One token a row. Returns the requests that ended."""
        tokens = result.next_token_ids
        ended: list[Req] = []
        dropped: list[int] = []
        requests, finished = self._requests, ReqStatus.FINISHED
        errors: Mapping[int, str] | None = result.row_errors
        terminated: Collection[int] = ()
        if step.constrained:
            errors, terminated = self._delayed.accept(step, tokens, result.row_errors)
        for i, (req, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if req.status is finished:
                dropped.append(i)
                continue
            if errors is not None and i in errors:
                dropped.append(i)
                ended.append(req)
                requests.end(req, req.fail(errors[i]))
                continue
            output = req.output_ids
            output.append(token)
            if not req.started:
                req.started = True
                self._outputs.start(req)
            if result.logprobs is not None:
                logprobs = result.logprobs[i]
                if logprobs is not None:
                    self._outputs.logprobs(req, (logprobs,))
            if token in req.stop_ids:
                ended.append(req)
                requests.end(req, req.finish("stop", matched_token=token))
            elif len(output) >= req.max_new_tokens:
                ended.append(req)
                requests.end(req, req.finish("stop" if i in terminated else "length"))
        self._end_terminated(step, terminated, ended)
        self._stats.generation_tokens_total += len(tokens) - len(dropped)
        rids, readers = step.rids, step.readers
        if dropped:
            rids, readers = np.delete(rids, dropped), np.delete(readers, dropped)
            tokens = np.delete(tokens, dropped).tolist()
        self._outputs.close_step(step.step, rids, tokens, readers)
        return ended

    def _commit_runs(
        self,
        mb: MicroBatch,
        step: LaunchedStep,
        result: GenerationBatchResult,
        verified: VerifiedRows,
    ) -> list[Req]:
        """The tokens of rows that checked drafts. Returns the requests that ended."""
        num_tokens = np.asarray(verified.num_tokens, np.int32)
        if step.drafts is not None:
            rows, planned = step.drafts
            mb.running.learn(rows, planned, num_tokens[len(num_tokens) - len(rows) :])
        ended: list[Req] = []
        requests = self._requests
        runs = list(_runs(result, verified))
        errors: Mapping[int, str] = result.row_errors or {}
        terminated: Collection[int] = ()
        if step.constrained:
            firsts = [run.tokens[0] if run.tokens else -1 for run in runs]
            errors, terminated = self._delayed.accept(step, firsts, errors)
        counts = np.zeros(len(runs), np.int32)
        flat: list[int] = []
        for i, (req, run) in enumerate(zip(step.sampled, runs, strict=True)):
            if req.finished:
                continue
            taken = self._take(req, run, i in terminated)
            counts[i] = taken
            flat += run.tokens[:taken]
            if req.finished:
                ended.append(req)
            elif i in errors:
                ended.append(req)
                requests.end(req, req.fail(errors[i]))
        self._end_terminated(step, terminated, ended)
        self._stats.generation_tokens_total += len(flat)
        gave = np.flatnonzero(counts)
        self._outputs.close_runs(step.step, step.rids[gave], flat, step.readers[gave], counts[gave])
        return ended

    def _take(self, req: Req, run: _Run, terminated: bool) -> int:
        """Add a run to a request up to its end. Returns the tokens that count."""
        output = req.output_ids
        taken = 0
        end: tuple[str, int | None] | None = None
        for token in run.tokens:
            taken += 1
            output.append(token)
            if token in req.stop_ids:
                end = ("stop", token)
            elif len(output) >= req.max_new_tokens:
                end = ("stop" if terminated else "length", None)
            if end is not None:
                break
        if run.num_drafted:
            stats, accepted = self._stats, max(min(taken, len(run.tokens) - 1), 0)
            stats.spec_decode_drafts_total += 1
            stats.spec_decode_draft_tokens_total += run.num_drafted
            stats.spec_decode_accepted_tokens_total += accepted
            by_position = stats.spec_decode_accepted_per_position_total
            by_position += [0] * (run.num_drafted - len(by_position))
            for position in range(accepted):
                by_position[position] += 1
            if req.prediction is not None:
                req.num_predicted += accepted
        if not taken:
            return 0
        if not req.started:
            req.started = True
            self._outputs.start(req)
        logprobs = [entry for entry in run.logprobs[:taken] if entry is not None]
        if logprobs:
            self._outputs.logprobs(req, logprobs)
        if end is not None:
            self._requests.end(req, req.finish(end[0], matched_token=end[1]))
        return taken

    def _end_terminated(
        self, step: LaunchedStep, terminated: Collection[int], ended: list[Req]
    ) -> None:
        """End the requests whose constraint is complete."""
        for i in terminated:
            req = step.sampled[i]
            if not req.finished:
                ended.append(req)
                self._requests.end(req, req.finish("stop"))


def _runs(result: GenerationBatchResult, verified: VerifiedRows) -> Iterator[_Run]:
    tokens, logprobs = result.next_token_ids, result.logprobs
    at = 0
    for count, drafted in zip(verified.num_tokens, verified.num_drafted, strict=True):
        end = at + count
        yield _Run(tokens[at:end], () if logprobs is None else logprobs[at:end], drafted)
        at = end
