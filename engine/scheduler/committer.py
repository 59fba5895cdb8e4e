"""`Committer`: what a step's result means for its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate

import numpy as np

from engine.protocol.step import GenerationBatchResult, IntArray
from engine.scheduler.delayed_sample import DelayedSamples
from engine.scheduler.micro_batch import LaunchedStep, MicroBatch
from engine.scheduler.outputs import OutputCollector
from engine.scheduler.req import Req, ReqStatus
from engine.scheduler.requests import Requests
from engine.scheduler.stats import SchedulerStats

_NOTHING: Mapping[int, str] = {}
_NO_LINES: Collection[int] = ()
_NOT_CUT: Mapping[int, int] = {}


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
        counts = result.num_tokens
        if step.drafts is not None:
            rows, planned = step.drafts
            gave = np.asarray(counts or [1] * len(step.sampled), np.int32)
            for batch in (mb.running, mb.paused):
                batch.learn(rows, planned, gave[len(gave) - len(rows) :])
            self._count_drafts(gave, np.asarray(result.num_drafts or [0] * len(gave), np.int32))
        ended = self._commit(step, result, counts)
        if result.drafts is not None:
            for req, drafts in zip(step.sampled, result.drafts, strict=True):
                req.drafts = drafts
        if ended:
            mb.remove(ended)
            for req in ended:
                self._requests.let_go(req)

    def _commit(
        self, step: LaunchedStep, result: GenerationBatchResult, counts: list[int] | None
    ) -> list[Req]:
        """`counts` [S]: tokens of each line; None: one each. Returns the requests that ended."""
        tokens, logprobs, finished = result.next_token_ids, result.logprobs, ReqStatus.FINISHED
        failed: Mapping[int, str] = result.line_errors or _NOTHING
        errors, terminated, cut = failed, _NO_LINES, _NOT_CUT
        runs: list[list[int]] | None = None
        if step.constrained:
            runs = _runs(tokens, counts, failed)
            errors, terminated, cut = self._delayed.accept(step, runs, failed)
        ended: list[Req] = []
        given: dict[int, int] = {}
        """By line: how many of its tokens count, if not all of them do."""
        if counts is None and logprobs is None and not errors and not terminated:
            for line, (req, token) in enumerate(zip(step.sampled, tokens, strict=True)):
                output = req.output_ids
                if req.status is finished:
                    given[line] = 0
                elif (
                    len(output) + 1 < req.max_new_tokens
                    and token not in req.stop_ids
                    and req.started
                ):
                    output.append(token)
                else:
                    self._take(req, [token], False)
                    if req.finished:
                        ended.append(req)
            self._close(step, tokens, counts, given)
            return ended
        end = 0
        if runs is None:
            runs = _runs(tokens, counts, failed)
        for line, (req, run) in enumerate(zip(step.sampled, runs, strict=True)):
            count = 1 if counts is None else counts[line]
            start, end = end, end + count
            kept = 0
            if req.status is not finished:
                if line in cut:
                    run = run[: cut[line]]
                if run:
                    kept = self._take(req, run, line in terminated)
                if logprobs is not None:
                    found = [entry for entry in logprobs[start : start + kept] if entry is not None]
                    if found:
                        self._outputs.logprobs(req, found)
                if line in errors and not req.finished:
                    self._requests.end(req, req.fail(errors[line]))
                if req.finished:
                    ended.append(req)
            if kept < max(count, 1):
                given[line] = kept
        for line in terminated:  # their constraint is complete
            req = step.sampled[line]
            if not req.finished:
                ended.append(req)
                self._requests.end(req, req.finish("stop"))
        self._close(step, tokens, counts, given)
        return ended

    def _take(self, req: Req, run: list[int], terminated: bool) -> int:
        """Add a run to a request up to its end, and end it there. Returns the tokens that count."""
        output = req.output_ids
        end: tuple[str, int | None] | None = None
        if len(output) + len(run) < req.max_new_tokens and req.stop_ids.isdisjoint(run):
            output += run
            taken = len(run)
        else:
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
        if req.sequence.prediction_ids is not None and req.constraint is None:
            req.num_predicted += min(taken, len(run) - 1)
        if not req.started:
            req.started = True
            self._outputs.start(req)
        if end is not None:
            self._requests.end(req, req.finish(end[0], matched_token=end[1]))
        return taken

    def _close(
        self,
        step: LaunchedStep,
        tokens: list[int],
        counts: list[int] | None,
        given: Mapping[int, int],
    ) -> None:
        """Send what lines gave: of their `counts` tokens all, or the first `given[line]`."""
        rids, readers = step.rids, step.readers
        if given:
            whole = np.asarray(counts or [1] * len(step.sampled), np.int32)
            starts = (np.cumsum(whole) - whole).tolist()
            kept = [given.get(line, count) for line, count in enumerate(whole.tolist())]
            spans = zip(starts, kept, strict=True)
            tokens = [token for start, n in spans for token in tokens[start : start + n]]
            gave = np.flatnonzero(kept)
            rids, readers = rids[gave], readers[gave]
            counts = None if counts is None else [n for n in kept if n]
        self._stats.generation_tokens_total += len(tokens)
        self._outputs.close(step.step, rids, tokens, readers, counts)

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


def _runs(
    tokens: list[int], counts: list[int] | None, failed: Mapping[int, str]
) -> list[list[int]]:
    """The tokens of each line, of one that failed those before its error."""
    if counts is None:
        return [[] if line in failed else [token] for line, token in enumerate(tokens)]
    ends = accumulate(counts)
    return [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]
