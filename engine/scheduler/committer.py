"""`Committer`: what a step's result means for its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from engine.protocol.messages import GenerationBatchResult, IntArray
from engine.protocol.step_parts import VerifiedRows
from engine.scheduler.delayed_sample import DelayedSamples
from engine.scheduler.micro_batch import LaunchedStep, MicroBatch
from engine.scheduler.outputs import OutputCollector
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.requests import Requests
from engine.scheduler.stats import SchedulerStats


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
        cut: Mapping[int, int] = {}
        if step.constrained:
            failed = errors or {}
            runs = [() if i in failed else (token,) for i, token in enumerate(tokens)]
            errors, terminated, cut = self._delayed.accept(step, runs, errors)
        for i, (req, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if req.status is finished:
                dropped.append(i)
                continue
            if errors is not None and i in errors:
                dropped.append(i)
                ended.append(req)
                requests.end(req, req.fail(errors[i]))
                continue
            if cut.get(i) == 0:  # its output was complete before this token
                dropped.append(i)
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
        self._count_drafts(num_tokens, np.asarray(verified.num_drafted, np.int32))
        tokens, logprobs, finished = result.next_token_ids, result.logprobs, ReqStatus.FINISHED
        errors: Mapping[int, str] = result.row_errors or {}
        terminated: Collection[int] = ()
        cut: Mapping[int, int] = {}
        if step.constrained:
            runs = _runs(tokens, verified.num_tokens)
            errors, terminated, cut = self._delayed.accept(step, runs, errors)
        special = {*errors, *terminated}
        ended: list[Req] = []
        counts, given = verified.num_tokens, None
        end = 0
        for i, (req, count) in enumerate(zip(step.sampled, counts, strict=True)):
            start, end = end, end + count
            kept = 0
            if req.status is not finished:
                run, output = tokens[start:end], req.output_ids
                if i in cut:
                    run = run[: cut[i]]
                if (
                    run
                    and logprobs is None
                    and req.started
                    and req.prediction is None
                    and i not in special
                    and len(output) + count < req.max_new_tokens
                    and req.stop_ids.isdisjoint(run)
                ):
                    output += run
                    continue
                if run:
                    kept = self._take(req, run, i in terminated)
                if logprobs is not None:
                    found = [entry for entry in logprobs[start : start + kept] if entry is not None]
                    if found:
                        self._outputs.logprobs(req, found)
                if i in errors and not req.finished:
                    self._requests.end(req, req.fail(errors[i]))
                if req.finished:
                    ended.append(req)
            if kept == 0 or kept < count:
                given = list(counts) if given is None else given
                given[i] = kept
        self._end_terminated(step, terminated, ended)
        self._close(step, tokens, counts, given)
        return ended

    def _take(self, req: Req, run: list[int], terminated: bool) -> int:
        """Add a run to a request up to its end, and end it there. Returns the tokens that count."""
        output = req.output_ids
        end: tuple[str, int | None] | None = None
        taken = 0
        for token in run:
            taken += 1
            output.append(token)
            if token in req.stop_ids:
                end = ("stop", token)
            elif len(output) >= req.max_new_tokens:
                end = ("stop" if terminated else "length", None)
            if end is not None:
                break
        if req.prediction is not None and req.constraint is None:
            req.num_predicted += min(taken, len(run) - 1)
        if not req.started:
            req.started = True
            self._outputs.start(req)
        if end is not None:
            self._requests.end(req, req.finish(end[0], matched_token=end[1]))
        return taken

    def _close(
        self, step: LaunchedStep, tokens: list[int], counts: list[int], given: list[int] | None
    ) -> None:
        """Send what rows gave: of their `counts` tokens the first `given`; None: all of them."""
        rids, readers = step.rids, step.readers
        if given is not None:
            starts = np.cumsum(counts) - counts
            spans = zip(starts.tolist(), given, strict=True)
            tokens = [token for start, n in spans for token in tokens[start : start + n]]
            gave = np.flatnonzero(given)
            rids, readers = rids[gave], readers[gave]
            counts = [n for n in given if n]
        self._stats.generation_tokens_total += len(tokens)
        self._outputs.close_runs(step.step, rids, tokens, readers, counts)

    def _count_drafts(self, num_tokens: IntArray, num_drafted: IntArray) -> None:
        stats, checked = self._stats, num_drafted > 0
        accepted = np.maximum(num_tokens[checked] - 1, 0)
        stats.spec_decode_drafts_total += int(checked.sum())
        stats.spec_decode_draft_tokens_total += int(num_drafted.sum())
        stats.spec_decode_accepted_tokens_total += int(accepted.sum())
        by_position = stats.spec_decode_accepted_per_position_total
        by_position += [0] * (int(num_drafted.max(initial=0)) - len(by_position))
        # Rows that accepted more than a place's number accepted the draft at that place.
        more_than = len(accepted) - np.cumsum(np.bincount(accepted))
        for position, count in enumerate(more_than[:-1].tolist()):
            by_position[position] += count

    def _end_terminated(
        self, step: LaunchedStep, terminated: Collection[int], ended: list[Req]
    ) -> None:
        """End the requests whose constraint is complete."""
        for i in terminated:
            req = step.sampled[i]
            if not req.finished:
                ended.append(req)
                self._requests.end(req, req.finish("stop"))


def _runs(tokens: list[int], counts: Sequence[int]) -> list[list[int]]:
    """The tokens of each row."""
    ends = accumulate(counts)
    return [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]
