"""Sampling in plain torch, for CPU and GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.features.draw import Draw, DrawParams, DrawPlan, DrawTable
from engine.sampling.hash_noise import HashNoise
from engine.sampling.line_group import LineGroup
from engine.sampling.scratch import Scratch
from engine.sampling.token_order import argmax, argmin

CPU_ELEMENTS = 131072
# 64 MiB in float32: enough to keep a GPU busy, and its working memory stays small.
GPU_ELEMENTS = 1 << 24
# Far above the rounding error of a float32 sum over a vocabulary, far below any top_p's purpose.
_MASS_MARGIN = 1e-4


class TorchSampling(SamplingBackend):
    """Draws by group of lines: greedy, whole vocabulary, top_p only, top_k.

    Each group costs only what it needs. In this order: an argmax; noise for every token; the same
    with a check, and a sort where the check fails; noise for the top k. The groups come from the
    host's plan, so that no step waits for the device.
    """

    def __init__(self, table: DrawTable) -> None:
        super().__init__(table)
        self._scratch = Scratch(table.device)
        self._noise = HashNoise(table.vocab_size, table.device)
        # A CPU takes as large a piece as its caches hold with the working memory: 15 instead of
        # 21 ms for [32, 32768] on one core of a busy machine.
        elements = CPU_ELEMENTS if table.device.type == "cpu" else GPU_ELEMENTS
        self._at_once = max(1, elements // table.vocab_size)

    def sample(self, logits: Tensor, plan: DrawPlan, rows: Tensor, positions: Tensor) -> Drawn:
        greedy = plan.groups.get(Draw.GREEDY)
        if greedy is not None and greedy.index is None:
            return _greedy(logits)
        drawn = Drawn(torch.empty_like(rows), logits.new_empty(rows.shape))
        if greedy is not None:
            _put(drawn, greedy, _greedy(greedy.take(logits)))
        params = self.table.params(rows)
        keys = self._noise.row_keys(self.table.mixed_seeds(rows), positions)
        for kind, group in plan.groups.items():
            if kind is Draw.GREEDY:
                continue
            lines = Lines(
                group.take(logits),
                DrawParams(*(group.take(values) for values in params)),
                group.take(keys),
            )
            at_once = group.count if kind is Draw.TOP_K else self._at_once
            parts = [self._draw(kind, part, plan) for part in lines.split(at_once)]
            values = (
                parts[0] if len(parts) == 1 else Drawn(*map(torch.cat, zip(*parts, strict=True)))
            )
            _put(drawn, group, values)
        return drawn

    def _draw(self, kind: Draw, lines: Lines, plan: DrawPlan) -> Drawn:
        max_logit = lines.logits.amax(1, keepdim=True)
        if kind is Draw.TOP_K:
            ids = self._draw_ordered(lines, max_logit, plan.max_top_k, plan.uses_min_p)
        elif kind is Draw.FULL:
            ids, _ = self._draw_full(lines, max_logit, plan.uses_min_p)
        else:
            ids = self._draw_nucleus(lines, max_logit, plan.uses_min_p)
        return Drawn(ids, max_logit.squeeze(1))

    def _draw_full(
        self, lines: Lines, max_logit: Tensor, uses_min_p: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens [n] drawn from the whole vocabulary, and p / max(p) [n, vocab]."""
        shape = (lines.logits.shape[0], lines.logits.shape[1])
        probs = self._scratch.get("probs", shape, torch.float32)
        torch.sub(lines.logits, max_logit, out=probs)
        probs.mul_(lines.params.inverse_temperature).exp_()
        work = self._scratch.get("noise", (2, *shape), torch.int32)
        if uses_min_p:
            kept = work[0].view(torch.float32)
            probs.mul_(torch.ge(probs, lines.params.min_p, out=kept))
        score = self._noise.minus_exponential(lines.keys, None, work)
        torch.div(probs, score, out=score)
        return argmin(score), probs

    def _draw_nucleus(self, lines: Lines, max_logit: Tensor, uses_min_p: bool) -> Tensor:
        """Tokens [n] drawn under top_p without top_k.

        The token that the noise chooses among all tokens is also its choice in any set that holds
        the token. So if it lies within the nucleus, no sort is needed. The mass of the tokens that
        are at least as likely shows whether it does. On a GPU, to ask would mean to wait for the
        device, so all lines are sorted.
        """
        vocab_size = self.table.vocab_size
        if lines.logits.device.type != "cpu":
            return self._draw_ordered(lines, max_logit, vocab_size, uses_min_p)
        ids, probs = self._draw_full(lines, max_logit, uses_min_p)
        column = ids.unsqueeze(1)
        before = self._scratch.get("noise", (2, *probs.shape), torch.int32)[0].view(torch.float32)
        torch.ge(lines.logits, lines.logits.gather(1, column), out=before)
        mass_before = before.mul_(probs).sum(1, keepdim=True) - probs.gather(1, column)
        limit = lines.params.top_p * probs.sum(1, keepdim=True) * (1.0 - _MASS_MARGIN)
        unsure = (mass_before < limit).logical_not_().squeeze(1).nonzero().squeeze(1)
        if len(unsure):
            ids[unsure] = self._draw_ordered(
                lines.pick(unsure), max_logit[unsure], vocab_size, uses_min_p
            )
        return ids

    def _draw_ordered(
        self, lines: Lines, max_logit: Tensor, count: int, uses_min_p: bool
    ) -> Tensor:
        """Tokens [n] drawn from the `count` likeliest under top_k, top_p and min_p."""
        ids = self._order.best(lines.logits, max_logit, count)
        probs = lines.logits.gather(1, ids).sub_(max_logit)
        probs.mul_(lines.params.inverse_temperature).exp_()
        work = self._scratch.get("noise", (2, ids.shape[0], ids.shape[1]), torch.int32)
        # 1 or 0 as float32: several times faster on a CPU than booleans.
        kept = work[0].view(torch.float32)
        if count < self.table.vocab_size:
            rank = torch.arange(count, device=ids.device)
            probs.mul_(torch.lt(rank, lines.params.top_k, out=kept))
        if uses_min_p:
            probs.mul_(torch.ge(probs, lines.params.min_p, out=kept))
        # float64 and a running sum: the tokens that a line keeps must not depend on `count`, which
        # the other lines determine.
        mass = probs.cumsum(1, dtype=torch.float64)
        limit = lines.params.top_p * mass[:, -1:]
        probs.mul_(torch.lt(mass.sub_(probs), limit, out=kept))
        score = self._noise.minus_exponential(lines.keys, ids, work)
        torch.div(probs, score, out=score)
        return ids.gather(1, argmin(score).unsqueeze(1)).squeeze(1)


class Lines(NamedTuple):
    """Some lines of the batch: `logits` [n, vocab], noise `keys` [n, 2]."""

    logits: Tensor
    params: DrawParams
    keys: Tensor

    def split(self, at_once: int) -> list[Lines]:
        """These lines in parts of at most `at_once`."""
        total = self.logits.shape[0]
        if total <= at_once:
            return [self]
        return [self.pick(slice(start, start + at_once)) for start in range(0, total, at_once)]

    def pick(self, which: slice | Tensor) -> Lines:
        """The lines with numbers `which`; a tensor is int64."""
        params = DrawParams(*(values[which] for values in self.params))
        return Lines(self.logits[which], params, self.keys[which])


def _greedy(logits: Tensor) -> Drawn:
    ids = argmax(logits)
    return Drawn(ids, logits.gather(1, ids.unsqueeze(1)).squeeze(1))


def _put(drawn: Drawn, group: LineGroup, values: Drawn) -> None:
    group.put(drawn.token_ids, values.token_ids)
    group.put(drawn.max_logit, values.max_logit)
