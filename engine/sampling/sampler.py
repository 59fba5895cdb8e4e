"""From logits to tokens: the last stage of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.protocol.step import TokenLogprobs
from engine.registry import SAMPLING_BACKENDS
from engine.sampling.base import SamplingBackend
from engine.sampling.draft_check import DraftCheck
from engine.sampling.features.base import SampledLines
from engine.sampling.features.logprobs import LogprobTensors, token_ranks
from engine.sampling.state import SamplingState


class HostTokens(NamedTuple):
    """`SampledTokens` on the host."""

    next_token_ids: np.ndarray
    """int32 [S]"""
    is_nan: np.ndarray
    """bool [S]"""
    logprobs: list[TokenLogprobs | None] | None
    """[S], None for lines that asked for none; None if no line asked."""
    num_kept: np.ndarray | None = None
    """int64, by line of the step, if it checked drafts."""


class SampledTokens(NamedTuple):
    """What a step sampled, still on the device. In a step that checks drafts a line has several of
    the S tokens."""

    next_token_ids: Tensor
    """int64 [S], always within the vocabulary."""
    is_nan: Tensor
    """bool [S]: the logits held NaN or +inf or allowed no token, so the token means
    nothing and its request has to end with an error."""
    logprobs: LogprobTensors | None
    logprob_lines: np.ndarray | None
    """int64: which of the S `logprobs` belongs to."""
    num_kept: Tensor | None = None
    """int64, by line of the step: its first tokens that are valid, if the step checks drafts."""

    def to_host(self) -> HostTokens:
        """Copy to the host and build messages. Waits for the device."""
        logprobs: list[TokenLogprobs | None] | None = None
        if self.logprobs is not None and self.logprob_lines is not None:
            logprobs = [None] * len(self.next_token_ids)
            for line, value in zip(
                self.logprob_lines.tolist(), self.logprobs.to_host(), strict=True
            ):
                logprobs[line] = value
        return HostTokens(
            self.next_token_ids.to("cpu", torch.int32).numpy(),
            self.is_nan.cpu().numpy(),
            logprobs,
            None if self.num_kept is None else self.num_kept.cpu().numpy(),
        )


class Sampler:
    """Applies the rows' sampling parameters to a step's logits.

    Order (vLLM's): log-probabilities of the raw distribution, allowed tokens, the adjustments of
    `engine.sampling.features`, then the draw. Nothing here waits for the device.
    """

    def __init__(self, state: SamplingState, sampling_backend: str = "torch") -> None:
        """Raises `ConfigError` for an unknown `sampling_backend`."""
        self.state = state
        self._backend: SamplingBackend = SAMPLING_BACKENDS[sampling_backend](state.draw)

    @torch.inference_mode()
    def __call__(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: np.ndarray,
        seq_lens: Tensor,
        mask: Tensor | None = None,
        check: DraftCheck | None = None,
    ) -> SampledTokens:
        """Sample one token per line, and tell the adjustments.

        With a `check` lines are tokens that follow one another: each is sampled as if the drafts
        before it were output, and only those that are kept count later.

        `logits` contiguous float32 [S, vocab], overwritten; `rows` int64 [S] on the device and
        the same on the host; `seq_lens` int64 [S]: tokens in the KV cache, which is the position
        of the new token; `mask` bool [S, vocab]: allowed tokens.
        """
        plan = self.state.plan(rows_cpu)
        raw = None if plan.logprobs is None else plan.logprobs.lines.take(logits)
        if raw is logits:
            raw = logits.clone()
        if mask is not None:
            logits.masked_fill_(mask.logical_not(), -torch.inf)
        lines = SampledLines(rows, seq_lens, check)
        for feature, planned in plan.adjustments:
            feature.apply(planned, logits, lines)
        drawn = self._backend.sample(logits, plan.draw, rows, seq_lens)
        num_kept = None if check is None else check.num_kept(drawn.token_ids)
        if plan.adjustments:
            kept = None if check is None or num_kept is None else check.is_kept(num_kept)
            for feature, planned in plan.adjustments:
                feature.drawn(planned, drawn.token_ids, kept)
        # x - x is NaN for NaN and for infinities. This costs a third of isfinite.
        is_nan = (drawn.max_logit - drawn.max_logit).isnan()
        if plan.logprobs is None or raw is None:
            return SampledTokens(drawn.token_ids, is_nan, None, None, num_kept)
        token_ids = plan.logprobs.lines.take(drawn.token_ids)
        logprobs = self._backend.logprobs(raw, token_ids, plan.logprobs.num_top.tolist())
        if plan.logprobs.listed is not None:
            logprobs = plan.logprobs.listed.before_top(logprobs, raw, token_ids)
        return SampledTokens(drawn.token_ids, is_nan, logprobs, plan.logprobs.lines_cpu, num_kept)

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Tensor, rows_cpu: np.ndarray, seq_lens: Tensor) -> Tensor:
        """Tokens int64 [S] drawn as `__call__` does, but without adjustments and masks. Nothing is
        counted."""
        plan = self.state.plan(rows_cpu).draw
        return self._backend.sample(logits, plan, rows, seq_lens).token_ids

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: Tensor, num_top: int
    ) -> LogprobTensors:
        """Log-probabilities and ranks of `next_token_ids` int64 [n] after n prompt positions.

        `logits` float32 [n, vocab] isn't changed.
        """
        found = self._backend.logprobs(logits, next_token_ids, [num_top] * len(logits))
        return found._replace(rank=token_ranks(logits, next_token_ids))
