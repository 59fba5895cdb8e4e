"""`DelayedSamples`: the launched steps whose sampling waits for masks (SGLang's delayed sample).

The mask of a constrained request depends on all tokens before. The last of them may be in flight.
So the step is launched at once, and sampled when the mask follows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.constraints import MaskArray, mask_words
from engine.protocol.step import ModelWorkerBatch, SampleMasks
from engine.scheduler.micro_batch import ConstrainedLine, LaunchedStep
from engine.scheduler.req import Req

logger = logging.getLogger(__name__)


class AcceptedTokens(NamedTuple):
    """What the constraints make of a step's tokens, by index into its sampled lines."""

    errors: dict[int, str]
    """Why a request can't go on: the worker's reasons, and tokens that weren't allowed."""
    terminated: Collection[int]
    """Rows whose output is complete with the last of these tokens that counts."""
    kept: dict[int, int]
    """How many tokens count, of lines in `errors` or `terminated`."""


class DelayedSamples:
    """Every delayed step gets exactly one `SampleMasks`, in launch order.

    Masks are made once all earlier tokens of their requests are committed. Until then an earlier
    step with such a request is in flight; its result makes the next step's masks possible.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)
        self._unmasked: deque[LaunchedStep] = deque()

    def launch(self, batch: ModelWorkerBatch, step: LaunchedStep) -> None:
        """Delay the step's sampling if a sampled line is constrained."""
        lines = [i for i, req in enumerate(step.sampled) if req.constraint is not None]
        if not lines:
            return
        planned: list[int] = [] if step.drafts is None else step.drafts[1].tolist()
        first = len(step.sampled) - len(planned)
        constrained = []
        for i in lines:
            req, forced = step.sampled[i], step.forced.get(i - first)
            num_drafts = planned[i - first] if forced is not None else 0
            constrained.append(ConstrainedLine(i, req, req.num_delayed, num_drafts, forced))
            req.num_delayed += 1
        step.constrained = constrained
        batch.delayed_sample = True
        self._unmasked.append(step)

    def take(self) -> list[SampleMasks]:
        """Masks of the steps that can be sampled now."""
        ready: list[SampleMasks] = []
        while self._unmasked and _is_up_to_date(self._unmasked[0].constrained):
            ready.append(self._masks(self._unmasked.popleft()))
        return ready

    def accept(
        self,
        step: LaunchedStep,
        runs: Sequence[Sequence[int]],
        line_errors: Mapping[int, str] | None,
    ) -> AcceptedTokens:
        """Advance the constraints of a step that is about to be committed.

        `runs` [S]: the tokens of each sampled line, of one in `line_errors` those before its error.
        `line_errors`: see `GenerationBatchResult`. Where a line failed because no token is left,
        its output ends if it is complete, and otherwise its own fields are to blame.
        """
        errors = dict(line_errors or {})
        terminated: set[int] = set()
        kept: dict[int, int] = {}
        for constrained in step.constrained:
            line, req = constrained.line, constrained.req
            req.num_accepted += 1
            if req.finished or req.constraint is None:
                continue
            for count, token in enumerate(runs[line]):
                if not req.constraint.accept(token):
                    if not req.constraint.error:
                        logger.error(
                            "request %s: sampled a token that its mask forbids",
                            req.sequence.request_id,
                        )
                    errors[line] = "the model sampled a token that the constraint doesn't allow"
                    kept[line] = count
                    break
                if req.constraint.is_terminated:
                    terminated.add(line)
                    kept[line] = count + 1
                    break
            else:
                left_out = (
                    _leaving_nothing(req, len(runs[line]), self._words) if line in errors else []
                )
                if left_out and req.constraint.may_end:
                    terminated.add(line)
                    kept[line] = len(runs[line])
                    del errors[line]
                elif left_out:
                    req.refuse(left_out)
        return AcceptedTokens(errors, terminated, kept)

    def _masks(self, step: LaunchedStep) -> SampleMasks:
        # The token of an ended request is dropped. A retracting request keeps its token.
        lines = [r for r in step.constrained if not r.req.finished]
        drafts = [_drafts(r) for r in lines]
        counts = [1 + len(d) for d in drafts]
        masks = np.zeros((sum(counts), self._words), np.uint32)
        end = 0
        for line, of_line, count in zip(lines, drafts, counts, strict=True):
            start, end = end, end + count
            assert line.req.constraint is not None
            line.req.constraint.fill_masks(of_line, masks[start:end])
        numbers = np.repeat(np.array([r.line for r in lines], np.int32), counts)
        return SampleMasks(step.step, numbers, masks)


def _leaving_nothing(req: Req, num_new: int, num_words: int) -> list[str]:
    """The fields of a request that leave no token behind its output and `num_new` more tokens;
    none if there is a token, so that something else went wrong. `num_words`: of a mask."""
    assert req.constraint is not None
    if req.constraint.error:
        return []
    params, constraint = req.params, req.params.constraint
    mask = np.zeros(num_words, np.uint32)
    req.constraint.fill_mask(mask)
    fields = []
    if mask.any() and len(req.output_ids) + num_new < params.min_tokens:
        fields.append("min_tokens")
        if any(_allows(mask, token) for token in params.stop_token_ids):
            fields.append("stop_token_ids")
        for token in (*req.stop_ids, *params.stop_token_ids):
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
    if mask.any():
        return []
    if params.allowed_token_ids is not None:
        fields.append("allowed_token_ids")
    if params.bad_words_ids:
        fields.append("bad_words")
    if constraint is not None:
        fields.append(constraint.field)
    return fields


def _allows(mask: MaskArray, token: int) -> bool:
    return bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def _drafts(line: ConstrainedLine) -> list[int]:
    """The drafts that the worker will check; its `StepFiller` comes to the same."""
    req = line.req
    if line.forced is None or not req.output_ids:
        return []
    length = req.prompt_len + len(req.output_ids)
    limit = req.prompt_len + req.max_new_tokens
    return line.forced.drafts(length, req.output_ids[-1], line.num_drafts, limit)


def _is_up_to_date(lines: Sequence[ConstrainedLine]) -> bool:
    return all(
        r.req.finished
        or r.req.num_accepted == r.number
        or (r.req.constraint is not None and r.req.constraint.is_static)
        for r in lines
    )
