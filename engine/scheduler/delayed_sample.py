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

from engine.constraints import mask_words
from engine.protocol.messages import ModelWorkerBatch, SampleMasks
from engine.scheduler.micro_batch import ConstrainedRow, LaunchedStep

logger = logging.getLogger(__name__)


class AcceptedTokens(NamedTuple):
    """What the constraints make of a step's tokens, by index into its sampled rows."""

    errors: dict[int, str]
    """Why a request can't go on: the worker's reasons, and tokens that weren't allowed."""
    terminated: Collection[int]
    """Rows whose output is complete with this token."""


class DelayedSamples:
    """Every delayed step gets exactly one `SampleMasks`, in launch order.

    Masks are made once all earlier tokens of their requests are committed. Until then an earlier
    step with such a request is in flight; its result makes the next step's masks possible.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)
        self._unmasked: deque[LaunchedStep] = deque()

    def launch(self, batch: ModelWorkerBatch, step: LaunchedStep) -> None:
        """Delay the step's sampling if a sampled row is constrained."""
        rows = [i for i, req in enumerate(step.sampled) if req.constraint is not None]
        if not rows:
            return
        lens = batch.seq_lens[batch.sample_rows].tolist()
        step.constrained = [
            ConstrainedRow(i, step.sampled[i], lens[i] - step.sampled[i].prompt_len) for i in rows
        ]
        batch.delayed_sample = True
        self._unmasked.append(step)

    def take(self) -> list[SampleMasks]:
        """Masks of the steps that can be sampled now."""
        ready: list[SampleMasks] = []
        while self._unmasked and _is_up_to_date(self._unmasked[0].constrained):
            ready.append(self._masks(self._unmasked.popleft()))
        return ready

    def accept(
        self, step: LaunchedStep, tokens: Sequence[int], row_errors: Mapping[int, str] | None
    ) -> AcceptedTokens:
        """Advance the constraints of a step that is about to be committed.

        `tokens` [S]: that of each sampled row. `row_errors`: see `GenerationBatchResult`.
        """
        errors = dict(row_errors or {})
        terminated: set[int] = set()
        for row, req, _ in step.constrained:
            if req.finished or row in errors or req.constraint is None:
                continue
            if not req.constraint.accept(tokens[row]):
                if not req.constraint.error:
                    logger.error(
                        "request %s: sampled a token that its mask forbids", req.request_id
                    )
                errors[row] = "the model sampled a token that the constraint doesn't allow"
            elif req.constraint.is_terminated:
                terminated.add(row)
        return AcceptedTokens(errors, terminated)

    def _masks(self, step: LaunchedStep) -> SampleMasks:
        # The token of an ended request is dropped. A retracting request keeps its token.
        rows = [r for r in step.constrained if not r.req.finished]
        masks = np.zeros((len(rows), self._words), np.uint32)
        for mask, (_, req, _) in zip(masks, rows, strict=True):
            assert req.constraint is not None
            req.constraint.fill_mask(mask)
        return SampleMasks(step.step, np.array([r.row for r in rows], np.int32), masks)


def _is_up_to_date(rows: Sequence[ConstrainedRow]) -> bool:
    return all(
        r.req.finished
        or len(r.req.output_ids) == r.num_output
        or (r.req.constraint is not None and r.req.constraint.is_static)
        for r in rows
    )
