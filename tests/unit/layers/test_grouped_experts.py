"""A mixture as grouped products against one that is computed expert by expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from engine.device.distributed import ParallelState
from engine.layers.experts import Experts
from engine.layers.grouped_experts import GroupedExperts
from engine.layers.weight_format import PlainFormat

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 6}
KINDS: dict[str, tuple[Any, Any]] = {
    "gated": (MixtralExperts, MixtralConfig(**SIZES)),
    "biased and transposed": (GptOssExperts, GptOssConfig(**SIZES)),
    "without gate": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=32, moe_intermediate_size=48, n_routed_experts=6),
    ),
}


def make(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    make_module, config = KINDS[kind]
    module = make_module(config)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    return module.to(dtype)


def routes(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(tokens)])
    chosen[chosen == 4] = 5  # an expert without tokens
    return torch.randn(tokens, 32).to(dtype), chosen, torch.rand(tokens, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_sum_of_the_experts(kind: str, dtype: torch.dtype) -> None:
    single = ParallelState.single()
    grouped = GroupedExperts(make(kind, dtype), single)
    apart = Experts(make(kind, dtype), PlainFormat(), single)
    for tokens in (1, 7, 64):
        given = routes(tokens, dtype)
        found, wanted = grouped(*given), apart(*given)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        assert torch.equal(found, grouped(*given))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_add_up_and_numbers_of_no_expert_add_nothing(kind: str) -> None:
    given = routes(20, torch.float32)
    wanted = GroupedExperts(make(kind, torch.float32), ParallelState.single())(*given)
    parts = []
    for rank in (0, 1):
        module = make(kind, torch.float32)
        for name, value in [*module.named_parameters()]:
            half = torch.nn.Parameter(value.data[3 * rank : 3 * rank + 3], requires_grad=False)
            setattr(module, name, half)
        parallel: Any = SimpleNamespace(tp_size=2, tp_rank=rank, all_reduce=lambda x: x)
        parts.append(GroupedExperts(module, parallel)(*given))
    torch.testing.assert_close(parts[0] + parts[1], wanted, atol=1e-5, rtol=1e-5)
    hidden, chosen, weights = given
    chosen[:, 1] = 6
    alone = GroupedExperts(make(kind, torch.float32), ParallelState.single())
    found = alone(hidden, chosen, weights)
    torch.testing.assert_close(found, alone(hidden, chosen[:, :1], weights[:, :1]))
