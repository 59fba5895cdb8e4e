"""Sampling for CUDA: FlashInfer finds the tokens that top_k and top_p leave, without sorting.

Manta draws by itself. Every request has a seed, given or drawn by the ingress, because a stream
whose engine dies goes on elsewhere with the same tokens. FlashInfer's drawing kernels take their
random numbers from the line's place in the batch and can't promise that, so only its filters are
used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.device.flashinfer_loader import load_flashinfer
from engine.sampling.base import Drawn
from engine.sampling.features.draw import Draw, DrawPlan, DrawTable
from engine.sampling.token_order import argmin
from engine.sampling.torch_backend import Lines, TorchSampling


class FlashInferSampling(TorchSampling):
    """`TorchSampling` with another way to draw under top_k and top_p.

    The filters keep all tokens that tie with the last one needed. Which of these stay is then
    decided by token id, as in `TorchSampling`, so that both draw the same tokens. The filters run
    in their deterministic mode, because each tensor parallel rank samples for itself.
    """

    def __init__(self, table: DrawTable) -> None:
        """Raises `ConfigError` if FlashInfer is missing."""
        super().__init__(table)
        self._kernels: Any = load_flashinfer().sampling

    def _draw(self, kind: Draw, lines: Lines, plan: DrawPlan) -> Drawn:
        if kind is Draw.FULL:
            return super()._draw(kind, lines, plan)
        # Working memory is [n, vocab] also for top_k; plain torch handles top_k in one piece.
        drawn = [
            self._draw_filtered(kind, part, plan.uses_min_p) for part in lines.split(self._at_once)
        ]
        return drawn[0] if len(drawn) == 1 else Drawn(*map(torch.cat, zip(*drawn, strict=True)))

    def _draw_filtered(self, kind: Draw, lines: Lines, uses_min_p: bool) -> Drawn:
        max_logit = lines.logits.amax(1, keepdim=True)
        probs = torch.sub(lines.logits, max_logit)
        probs.mul_(lines.params.inverse_temperature).exp_()
        # top_k counts tokens that min_p drops too.
        filtered = self._top_k(probs, lines.params.top_k) if kind is Draw.TOP_K else probs
        if uses_min_p:
            filtered = filtered * (probs >= lines.params.min_p)
        filtered = self._top_p(filtered, lines.params.top_p)
        work = self._scratch.get("noise", (2, *filtered.shape), torch.int32)
        score = self._noise.minus_exponential(lines.keys, None, work)
        torch.div(filtered, score, out=score)
        return Drawn(argmin(score), max_logit.squeeze(1))

    def _top_k(self, probs: Tensor, top_k: Tensor) -> Tensor:
        """`probs` [n, vocab] of the `top_k` int64 [n, 1] likeliest tokens, 0 for the others."""
        kept = self._kernels.top_k_renorm_probs(
            probs, top_k.squeeze(1).int(), is_deterministic=True
        )
        above, tied, _ = _split_at_least(probs, kept)
        room = top_k - above.sum(1, keepdim=True)
        return probs * (above | _first(tied, room))

    def _top_p(self, probs: Tensor, top_p: Tensor) -> Tensor:
        """`probs` [n, vocab] of the likeliest tokens, before each of which there is less than
        `top_p` float32 [n, 1] of the mass; 0 for the others."""
        kept = self._kernels.top_p_renorm_probs(
            probs, top_p.squeeze(1).clamp(max=1.0), is_deterministic=True
        )
        above, tied, least = _split_at_least(probs, kept)
        mass = probs.sum(1, keepdim=True, dtype=torch.float64)
        mass_above = (probs * above).sum(1, keepdim=True, dtype=torch.float64)
        room = ((top_p * mass - mass_above) / least).ceil()
        # Lines without top_p keep tokens that rounding would lose.
        return probs * (above | _first(tied, room) | (top_p > 1.0))


def _split_at_least(probs: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens above the least likely one of `kept` (not 0), tokens that tie with it, and its `probs`
    [n, 1]."""
    least = torch.where(kept > 0, probs, torch.inf).amin(1, keepdim=True)
    return probs > least, probs == least, least


def _first(chosen: Tensor, count: Tensor) -> Tensor:
    """Keep the first `count` [n, 1] set entries of each row of `chosen` bool [n, vocab]."""
    return chosen & (chosen.cumsum(1, dtype=torch.int32) <= count)
