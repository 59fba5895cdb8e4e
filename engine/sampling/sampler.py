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
from engine.sampling.logprobs import LogprobTensors, token_ranks
from engine.sampling.plan import SamplingPlan
from engine.sampling.state import SamplingState


class HostTokens(NamedTuple):
    """`SampledTokens` on the host."""

    next_token_ids: np.ndarray
    """int32 [S]"""
    nan_rows: np.ndarray
    """bool [S]"""
    logprobs: list[TokenLogprobs | None] | None
    """[S], None for rows that asked for none; None if no row asked."""
    num_kept: np.ndarray | None = None
    """int64, by row of the step, if it checked drafts."""


class SampledTokens(NamedTuple):
    """What a step sampled, still on the device. In a step that checks drafts a row has several of
    the S tokens."""

    next_token_ids: Tensor
    """int64 [S], always within the vocabulary."""
    nan_rows: Tensor
    """bool [S]: the logits held NaN or +inf or allowed no token, so the row's token means
    nothing and its request has to end with an error."""
    logprobs: LogprobTensors | None
    logprob_rows: np.ndarray | None
    """int64: the rows that `logprobs` belongs to."""
    num_kept: Tensor | None = None
    """int64, by row of the step: its first tokens that are valid, if the step checks drafts."""

    def to_host(self) -> HostTokens:
        """Copy to the host and build messages. Waits for the device."""
        logprobs: list[TokenLogprobs | None] | None = None
        if self.logprobs is not None and self.logprob_rows is not None:
            logprobs = [None] * len(self.next_token_ids)
            for row, value in zip(self.logprob_rows.tolist(), self.logprobs.to_host(), strict=True):
                logprobs[row] = value
        return HostTokens(
            self.next_token_ids.to("cpu", torch.int32).numpy(),
            self.nan_rows.cpu().numpy(),
            logprobs,
            None if self.num_kept is None else self.num_kept.cpu().numpy(),
        )


class Sampler:
    """Applies the slots' sampling parameters to a step's logits.

    Order (vLLM's): log-probabilities of the raw distribution, allowed tokens, logit bias,
    min_tokens, repetition, presence and frequency penalty, then the backend: temperature, min_p,
    top_k, top_p, draw. Nothing here waits for the device.
    """

    def __init__(self, state: SamplingState, sampling_backend: str = "torch") -> None:
        """Raises `ConfigError` for an unknown `sampling_backend`."""
        self.state = state
        self._backend: SamplingBackend = SAMPLING_BACKENDS[sampling_backend](state)

    @torch.inference_mode()
    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        slots_cpu: np.ndarray,
        seq_lens: Tensor,
        mask: Tensor | None = None,
        check: DraftCheck | None = None,
    ) -> SampledTokens:
        """Sample one token per row and count it for the penalties.

        With a `check` rows are tokens that follow one another: each is sampled as if the drafts
        before it were output, and only those that are kept count later.

        `logits` contiguous float32 [S, vocab], overwritten; `slots` int64 [S] on the device and
        the same on the host; `seq_lens` int64 [S]: tokens in the KV cache, which is the position
        of the new token; `mask` bool [S, vocab]: allowed tokens.
        """
        plan = self.state.plan(slots_cpu)
        raw = None if plan.logprobs is None else plan.logprobs.rows.take(logits)
        if raw is logits:
            raw = logits.clone()
        self._adjust(logits, plan, slots, seq_lens, mask, check)
        drawn = self._backend.sample(logits, plan, slots, seq_lens)
        num_kept = None if check is None else check.num_kept(drawn.token_ids)
        if plan.penalties is not None:
            kept = None if check is None or num_kept is None else check.is_kept(num_kept)
            self.state.penalty_pool.add_tokens(plan.penalties, drawn.token_ids, kept)
        # x - x is NaN for NaN and for infinities. This costs a third of isfinite.
        nan_rows = (drawn.row_max - drawn.row_max).isnan()
        if plan.logprobs is None or raw is None:
            return SampledTokens(drawn.token_ids, nan_rows, None, None, num_kept)
        token_ids = plan.logprobs.rows.take(drawn.token_ids)
        logprobs = self._backend.logprobs(raw, token_ids, plan.logprobs.num_top.tolist())
        if plan.logprobs.listed is not None:
            logprobs = plan.logprobs.listed.before_top(logprobs, raw, token_ids)
        rows = plan.logprobs.batch_rows
        return SampledTokens(drawn.token_ids, nan_rows, logprobs, rows, num_kept)

    @torch.inference_mode()
    def draw(
        self, logits: Tensor, slots: Tensor, slots_cpu: np.ndarray, seq_lens: Tensor
    ) -> Tensor:
        """Tokens int64 [S] drawn as `__call__` does, but for what depends on earlier tokens: no
        penalties, bias or masks. Nothing is counted."""
        return self._backend.sample(logits, self.state.plan(slots_cpu), slots, seq_lens).token_ids

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: Tensor, num_top: int
    ) -> LogprobTensors:
        """Log-probabilities and ranks of `next_token_ids` int64 [n] after n prompt positions.

        `logits` float32 [n, vocab] isn't changed.
        """
        found = self._backend.logprobs(logits, next_token_ids, [num_top] * len(logits))
        return found._replace(rank=token_ranks(logits, next_token_ids))

    def _adjust(
        self,
        logits: Tensor,
        plan: SamplingPlan,
        slots: Tensor,
        seq_lens: Tensor,
        mask: Tensor | None,
        check: DraftCheck | None,
    ) -> None:
        if mask is not None:
            logits.masked_fill_(mask.logical_not(), -torch.inf)
        flat = logits.view(-1)
        if plan.bias is not None:
            flat.scatter_add_(0, plan.bias.index, plan.bias.values)
        if plan.banned is not None:
            too_short = seq_lens < self.state.min_lens(slots)
            ban = torch.where(too_short, -torch.inf, 0.0).to(logits.dtype)
            flat.scatter_add_(0, plan.banned.index, ban.index_select(0, plan.banned.rows))
        if plan.penalties is not None:
            factors = self.state.penalty_factors(slots)
            earlier = None if check is None else check.earlier
            self.state.penalty_pool.apply(logits, plan.penalties, factors, earlier)
