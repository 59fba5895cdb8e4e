"""Tiny models that transformers' code computes, and what all of them have to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import (
    Engine,
    engine_for,
    greedy_reference,
    load_exact_reference,
    load_reference,
    reference_logprobs,
)
from tests.support.models import make_model

MAX_NEW = 10
GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=2)
SHARED = [7 + 5 * i % 190 for i in range(40)]
PROMPTS = [[5], [*SHARED, 9, 8, 3], SHARED + list(range(20, 60)), SHARED[:33], [3, 4] * 9]
RUNS: tuple[dict[str, Any], ...] = (
    {"chunked_prefill_size": -1},
    {"chunked_prefill_size": 16, "warm": [SHARED]},
    {"chunked_prefill_size": 16, "retract_every": 3, "enable_overlap": False},
)
"""Arguments of `Engine.run`."""
TOLERANCE = 1e-4


@contextmanager
def made_when_asked(
    factory: pytest.TempPathFactory, models: Mapping[str, tuple[str, dict[str, Any]]]
) -> Iterator[dict[str, Path]]:
    """Folders of `models`, by name with `make_model`'s arguments, each made when it is first asked
    for. Layouts are recorded in this process."""
    transformers.utils.logging.set_verbosity_error()

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            arch, keys = models[name]
            self[name] = make_model(factory.mktemp(name), arch, **keys)
            return self[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        yield Folders()


def with_layers(
    models: Mapping[str, tuple[str, dict[str, Any]]], count: int = 4
) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same with `count` layers, where their keys don't say how many."""
    return {
        name: (arch, {"num_hidden_layers": count, **keys}) for name, (arch, keys) in models.items()
    }


def assert_same_as_transformers(
    folder: Path,
    runs: Sequence[dict[str, Any]] = RUNS,
    *,
    num_distinct: int = len(PROMPTS),
    tolerance: float = TOLERANCE,
    look: Callable[[Engine, dict[str, Any]], None] = lambda engine, keys: None,
    **config: Any,
) -> None:
    """An engine gives transformers' greedy tokens, at least `num_distinct` different outputs of
    them, in all `runs`, and its log-probabilities within `tolerance` of its own, in float32 or in
    float64. `look` is called after each run."""
    model = load_reference(folder)
    expected = greedy_reference(model, PROMPTS, MAX_NEW)
    assert len({tuple(tokens) for tokens in expected}) >= num_distinct
    with engine_for(folder, **config) as engine:
        for keys in runs:
            assert engine.run(PROMPTS, GREEDY, **keys) == expected, keys
            look(engine, keys)
        found = engine.logprobs
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        wanted = reference_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
        mine = [entry.logprob for entry in found[number]]
        if not np.allclose(mine, wanted[range(MAX_NEW), tokens], atol=tolerance, rtol=0):
            exact = load_exact_reference(folder)
            wanted = reference_logprobs(exact, prompt + tokens)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(mine, wanted[range(MAX_NEW), tokens], atol=tolerance, rtol=0)
