"""Whole engines on a GPU against transformers: torch in float32, FlashInfer in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.device.flashinfer_loader import flashinfer_installed
from tests.support.engines import engine_for, load_reference, reference_logprobs
from tests.support.models import ARCHITECTURES, THROUGH_TRANSFORMERS, WITH_STATES, make_model
from tests.support.other_architectures import (
    GREEDY,
    PROMPTS,
    RUNS,
    assert_same_as_transformers,
    made_when_asked,
    with_layers,
)

MEAN_ERROR, MOST_ERRORS = 0.3, 1.0
"""Of bfloat16's log-probabilities, in nats: the mean, and the largest but for a tenth. Those of
these models' tokens lie 22 apart on average. torch in bfloat16 on a CPU errs by 0.01 to 0.2 on
average; a mixture that takes another expert, by up to 5 at a token."""
WITH_FLASHINFER = {
    **ARCHITECTURES,
    **with_layers(
        {
            name: THROUGH_TRANSFORMERS[name]
            for name in (
                *("granite", "phi3", "olmo2", "smollm3", "glm4", "gpt_neox", "cohere2"),
                *("gemma3", "mixtral", "qwen3_moe"),
            )
        }
    ),
}
HALF_SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    models = {**ARCHITECTURES, **with_layers({**THROUGH_TRANSFORMERS, **WITH_STATES})}
    models["nemotron_h"] = WITH_STATES["nemotron_h"]  # counts its list of blocks
    with made_when_asked(tmp_path_factory, models) as found:
        yield found


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("name", [*ARCHITECTURES, *THROUGH_TRANSFORMERS, *WITH_STATES])
def test_float32_gives_the_tokens_of_transformers(folders: dict[str, Path], name: str) -> None:
    # transformers computes on the CPU, whose sums have another order.
    assert_same_as_transformers(folders[name], tolerance=1e-3, device="cuda", kernels="torch")


@pytest.mark.parametrize("name", WITH_FLASHINFER)
def test_bfloat16_with_flashinfer_stays_near_transformers(
    name: str, tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Random weights give close rivals, so tokens are held to float32's log-probabilities."""
    if not flashinfer_installed():
        pytest.skip("needs flashinfer-python")
    architecture, keys = WITH_FLASHINFER[name]
    folder = make_model(tmp_path, architecture, **{**keys, **HALF_SIZES})
    model = load_reference(folder)
    with engine_for(folder, device="cuda", dtype="bfloat16", kernels="flashinfer") as engine:
        for run in RUNS:
            outputs = engine.run(PROMPTS, GREEDY, **run)
            errors: list[float] = []
            for number, (prompt, tokens) in enumerate(zip(PROMPTS, outputs, strict=True)):
                wanted = reference_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
                chosen = wanted[np.arange(len(tokens)), tokens]
                mine = [entry.logprob for entry in engine.logprobs[number]]
                errors += [*np.abs(chosen - mine)]
            assert np.mean(errors) < MEAN_ERROR, run
            assert np.quantile(errors, 0.9) < MOST_ERRORS, run
