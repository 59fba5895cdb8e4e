"""Rows for the sampler, and the results that transformers and a float64 draw give for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import RowParams
from engine.sampling.hash_noise import HashNoise, mix_seed
from engine.sampling.sampler import SampledTokens, Sampler

VOCAB = 512


EOS = 3


CPU = torch.device("cpu")


@dataclass
class Row:
    """One request: its parameters and tokens, and the logits of the step."""

    logits: Tensor
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [5, 6, 7, 5])
    output: list[int] = field(default_factory=list)

    def install(self, slot: int) -> RowParams:
        tokens = np.array(self.prompt + self.output, dtype=np.int32)
        return RowParams(slot, len(self.prompt), [EOS], self.params, tokens)

    @property
    def seq_len(self) -> int:
        return len(self.prompt) + len(self.output)


def step(
    sampler: Sampler, rows: list[Row], slots: list[int], mask: Tensor | None = None
) -> SampledTokens:
    """One call of the sampler with slots already installed."""
    return sampler(
        torch.stack([row.logits for row in rows]),
        torch.tensor(slots),
        np.array(slots, dtype=np.int32),
        torch.tensor([row.seq_len for row in rows]),
        mask,
    )


def random_logits(seed: int, spread: float = 2.0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference_logits(row: Row) -> Tensor:
    """The row's logits, float64 [1, V], after everything but temperature and filters."""
    params = row.params
    scores = row.logits.double()[None].clone()
    for token, bias in (params.logit_bias or {}).items():
        scores[0, token] += bias
    if len(row.output) < params.min_tokens:
        scores[0, [EOS, *params.stop_token_ids]] = -torch.inf
    if params.repetition_penalty != 1.0:
        penalise = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = penalise(torch.tensor([row.prompt + row.output]), scores)
    for token in set(row.output):
        scores[0, token] -= params.presence_penalty
        scores[0, token] -= params.frequency_penalty * row.output.count(token)
    return scores


def reference_scores(row: Row) -> Tensor:
    """Log-probability plus Gumbel noise of each token, float64 [V]; -inf where filtered out."""
    params = row.params
    scores = reference_logits(row)
    if params.temperature < 1e-5:
        return scores[0]
    scores = TemperatureLogitsWarper(float(params.temperature))(None, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    noise = HashNoise(len(row.logits), CPU)
    assert params.seed is not None
    keys = noise.row_keys(torch.tensor([mix_seed(params.seed)]), torch.tensor([row.seq_len]))
    work = torch.empty((2, 1, len(row.logits)), dtype=torch.int32)
    u = noise.uniform(keys, None, work).double()
    return (scores.log_softmax(1) - torch.log(-torch.log(u)))[0]


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.7},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.05},
]


PENALTIES = [
    {},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
]


def many_rows(count: int, spread: float = 2.0, vocab: int = VOCAB) -> list[Row]:
    """Rows with all kinds of parameters mixed."""
    rows = []
    for i in range(count):
        params = SamplingParams(
            temperature=[0.0, 0.7, 1.0, 1.3][i % 4],
            seed=1000 + i,
            logit_bias={9: 4.0, 10: -3.0} if i % 5 == 0 else None,
            min_tokens=4 if i % 6 == 0 else 0,
            stop_token_ids=[11] if i % 3 == 0 else [],
            logprobs=i % 4 if i % 7 == 0 else None,
            **FILTERS[i % len(FILTERS)],
            **PENALTIES[i % len(PENALTIES)],
        )
        output = [(7 * j + i) % 40 for j in range(i % 9)]
        rows.append(Row(random_logits(i, spread, vocab), params, output=output))
    return rows
