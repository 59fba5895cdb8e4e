"""Layers with windows that have room for far fewer tokens than the others: the same tokens as
`transformers`, however they are scheduled. `make test-matrix` has more layouts than `make test`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from engine.scheduler.scheduler_config import SchedulerConfig
from tests.support.drafters import OUTPUTS
from tests.support.engines import (
    KV_TOKENS,
    engine_for,
    greedy_reference,
    load_reference,
    reference_logprobs,
)
from tests.support.models import ARCHITECTURES, THROUGH_TRANSFORMERS, make_model

MAX_NEW = 40
SHARED = [7 + 5 * i % 90 for i in range(70)]
PROMPTS = [SHARED + [9 + i] * (1 + 17 * (i % 4)) + [3 + i, 5, 11 + i] for i in range(9)] + [
    [40 + i] * 6 for i in range(3)
]
WARM = [
    [90 - i % 80 for i in range(200)],
    [3 + i % 70 for i in range(150)],
    SHARED,
]
GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=1)
KEYS: dict[str, Any] = {
    "chunked_prefill_size": 32,
    "max_running_requests": 6,
    "swa_full_tokens_ratio": 0.05,
}
# (model, kernels, tp, pp, page)
SUBSET = [
    ("gemma3", "cpu", 1, 1, 1),
    ("mistral", "torch", 1, 1, 1),
    ("mistral", "cpu", 1, 2, 16),
]
LAYOUTS = [
    *SUBSET,
    ("gemma3", "torch", 1, 1, 16),
    ("gpt_oss", "cpu", 1, 1, 16),
    ("llama4", "torch", 1, 1, 1),
    ("llama4", "cpu", 1, 1, 16),
    ("gpt_oss", "cpu", 2, 2, 16),
]


def folder_of(parent: Path, name: str) -> Path:
    architecture, keys = {**ARCHITECTURES, **THROUGH_TRANSFORMERS}[name]
    return make_model(parent / name, architecture, **{"num_hidden_layers": 4, **keys})


@pytest.mark.parametrize(("name", "kernels", "tp", "pp", "page"), LAYOUTS)
def test_tokens_are_those_of_transformers(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    kernels: str,
    tp: int,
    pp: int,
    page: int,
) -> None:
    if (name, kernels, tp, pp, page) not in SUBSET and not request.config.getoption(
        "--full-matrix"
    ):
        pytest.skip("not in the covering subset (make test-matrix runs it)")
    transformers.utils.logging.set_verbosity_error()
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    folder = folder_of(tmp_path, name)
    reference = load_reference(folder)
    want = greedy_reference(reference, PROMPTS, MAX_NEW)
    keys = {**KEYS, "kernels": kernels, "tp_size": tp, "pp_size": pp, "page_size": page}
    with engine_for(folder, **keys) as engine:
        windows = SchedulerConfig(engine.resolved, KV_TOKENS).windows
        assert windows is not None and windows.tokens(KV_TOKENS) < KV_TOKENS // 4
        for cache, retract, overlap in ((True, 0, True), (True, 3, False), (False, 4, True)):
            found = engine.run(
                PROMPTS,
                GREEDY,
                warm=WARM,
                retract_every=retract,
                enable_prefix_cache=cache,
                enable_overlap=overlap,
            )
            assert found == want
            assert (max(engine.cached.values()) > 0) == cache
        for number in (1, 7):
            prompt = PROMPTS[number]
            logprobs = reference_logprobs(reference, prompt + want[number])
            for at, entry in enumerate(engine.logprobs[number]):
                token = want[number][at]
                assert abs(entry.logprob - logprobs[len(prompt) + at - 1][token]) < 1e-4


def test_drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Right ones and wrong ones, whose places in a window the next step writes again."""
    transformers.utils.logging.set_verbosity_error()
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    folder = folder_of(tmp_path, "gemma3")
    want = greedy_reference(load_reference(folder), PROMPTS, MAX_NEW)
    outputs = tmp_path / "outputs.json"
    outputs.write_text(json.dumps([a + b for a, b in zip(PROMPTS, want, strict=True)]))
    monkeypatch.setenv(OUTPUTS, str(outputs))
    drafts = {
        "method": "tests.support.drafters:RightUntilError",
        "num_speculative_tokens": 4,
        "draft_length": "fixed",
    }
    with engine_for(folder, page_size=1, speculative_config=drafts, **KEYS) as engine:
        assert SchedulerConfig(engine.resolved, KV_TOKENS).windows is not None
        for retract, overlap in ((0, True), (3, True), (4, False)):
            found = engine.run(
                PROMPTS, GREEDY, warm=WARM, retract_every=retract, enable_overlap=overlap
            )
            assert found == want
            assert engine.stats.spec_decode_accepted_tokens_total > 0
