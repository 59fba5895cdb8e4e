"""The order of tokens by likelihood, where the sampler's own tests don't see it."""

from __future__ import annotations

import pytest
import torch

from engine.sampling.token_order import TokenOrder


@pytest.mark.parametrize("row_max", [-0.0, 0.0])
def test_zeros_of_both_signs_tie(row_max: float) -> None:
    logits = torch.full((3, 64), -9.0)
    logits[:, 10:20] = torch.tensor([-0.0, 0.0]).repeat(5)
    order = TokenOrder(64, torch.device("cpu"))
    best = order.best(logits, torch.full((3, 1), row_max), 10)
    assert best.tolist() == [list(range(10, 20))] * 3
