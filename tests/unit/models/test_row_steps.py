"""Decoders that keep states of requests beside attention: their own tokens, whatever the steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import (
    engine_for,
    greedy_reference,
    load_reference,
    reference_logprobs,
    reference_states,
)
from tests.support.models import WITH_STATES, make_model

MAX_NEW = 10
GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=2)
SHARED = [7 + 5 * i % 190 for i in range(40)]
PROMPTS = [[5], [*SHARED, 9, 8, 3], SHARED + list(range(20, 60)), SHARED[:33], [3, 4] * 9]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models by name, made when first asked for; layouts are recorded in this process."""
    transformers.utils.logging.set_verbosity_error()

    class Lazy(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            arch, keys = WITH_STATES[name]
            keys = {"num_hidden_layers": 4, **keys}
            if arch == "NemotronHForCausalLM":
                del keys["num_hidden_layers"]
            self[name] = make_model(tmp_path_factory.mktemp(name), arch, **keys)
            return self[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
        yield Lazy()


@pytest.mark.parametrize(("name", "page"), zip(WITH_STATES, cycle((1, 16)), strict=False))
def test_tokens_and_logprobs_are_those_of_transformers(
    folders: dict[str, Path], name: str, page: int
) -> None:
    model = load_reference(folders[name])
    expected = greedy_reference(model, PROMPTS, MAX_NEW)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    with engine_for(folders[name], page_size=page) as engine:
        for keys in (
            {"chunked_prefill_size": -1},
            {"chunked_prefill_size": 16, "warm": [SHARED]},
            {"chunked_prefill_size": 16, "retract_every": 3, "enable_overlap": False},
            {"chunked_prefill_size": 24, "retract_every": 4, "max_running_requests": 2},
        ):
            assert engine.run(PROMPTS, GREEDY, **keys) == expected, keys
            assert not any(engine.cached.values())
            assert engine.retractions or "retract_every" not in keys
        found = engine.logprobs
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        wanted = reference_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
        mine = [entry.logprob for entry in found[number]]
        np.testing.assert_allclose(mine, wanted[range(MAX_NEW), tokens], atol=TOLERANCE, rtol=0)
