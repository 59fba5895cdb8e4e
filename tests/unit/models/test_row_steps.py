"""Decoders that keep states of requests beside attention: their own tokens, whatever the steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from engine.checkpoint.layout import StateSpec
from engine.config import EngineConfig, load_config
from engine.errors import ConfigError
from engine.models import recording
from engine.models.row_model import RowModel
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.worker.auto_config import make_worker_config
from engine.worker.sizing.estimate import memory_of, profile_max_tokens
from tests.support.engines import (
    Engine,
    engine_for,
    greedy_reference,
    load_reference,
    reference_logprobs,
    reference_states,
)
from tests.support.models import WITH_STATES, changed, make_config, make_model
from tests.support.other_architectures import (
    GREEDY,
    MAX_NEW,
    PROMPTS,
    SHARED,
    TOLERANCE,
    assert_same_as_transformers,
    made_when_asked,
    with_layers,
)
from tests.support.step_driver import StepDriver, make_runner

RUNS: tuple[dict[str, Any], ...] = (
    {"chunked_prefill_size": -1, "warm": [SHARED]},
    {"chunked_prefill_size": 16, "retract_every": 3, "enable_overlap": False},
    {"chunked_prefill_size": 24, "retract_every": 4, "max_running_requests": 2},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models by name, made when first asked for; layouts are recorded in this process."""
    models = with_layers(WITH_STATES)
    models["nemotron_h"] = WITH_STATES["nemotron_h"]  # counts its list of blocks
    with made_when_asked(tmp_path_factory, models) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "page", "kernels"),
    [(name, *rest) for name, rest in zip(WITH_STATES, cycle(((1, "auto"), (16, "torch"))))],
)
def test_tokens_and_logprobs_are_those_of_transformers(
    folders: dict[str, Path], name: str, page: int, kernels: str
) -> None:
    def look(engine: Engine, keys: dict[str, Any]) -> None:
        assert not any(engine.cached.values())
        assert engine.retractions or "retract_every" not in keys

    assert_same_as_transformers(folders[name], RUNS, look=look, page_size=page, kernels=kernels)


@pytest.mark.parametrize("name", ["granite4", "jamba", "mamba"])
def test_embeddings_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    model = load_reference(folders[name])
    kinds: list[Pooling | None] = ["last", "mean", None, "last", "mean"]
    with engine_for(folders[name], page_size=4) as engine:
        engine.run(PROMPTS, GREEDY, chunked_prefill_size=16, pooling=kinds, retract_every=3)
    for number, kind in enumerate(kinds):
        if kind is not None:
            states = reference_states(model, PROMPTS[number])
            wanted = states[-1] if kind == "last" else states.mean(axis=0)
            np.testing.assert_allclose(engine.embeddings[number], wanted, atol=TOLERANCE, rtol=0)


def test_rows_of_requests_that_left_are_begun_anew(folders: dict[str, Path]) -> None:
    """With steps in flight, two rows, and clients that leave early."""
    expected = greedy_reference(load_reference(folders["granite4"]), PROMPTS, MAX_NEW)
    with engine_for(folders["granite4"], page_size=4) as engine:
        keys = {"chunked_prefill_size": 16, "max_running_requests": 2}
        found = engine.run(PROMPTS * 2, GREEDY, stop_after={0: 1, 2: 4, 3: 2, 6: 3, 8: 5}, **keys)
    for number, tokens in enumerate(found):
        wanted = expected[number % len(PROMPTS)]
        assert tokens == wanted[: len(tokens)]
        assert len(tokens) == MAX_NEW or number in (0, 2, 3, 6, 8)


def test_prompt_logprobs_are_those_of_transformers(folders: dict[str, Path]) -> None:
    model = load_reference(folders["qwen3_next"])
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    with engine_for(folders["qwen3_next"]) as engine:
        engine.run(PROMPTS, params, chunked_prefill_size=16)
    for number, prompt in enumerate(PROMPTS):
        wanted = reference_logprobs(model, prompt)[range(len(prompt) - 1), prompt[1:]]
        mine = [entry.logprob for entry in engine.prompt_logprobs[number] if entry is not None]
        np.testing.assert_allclose(mine, wanted, atol=TOLERANCE, rtol=1e-5)


def test_what_a_layout_holds_of_states(folders: dict[str, Path]) -> None:
    layout = recording.record(folders["falcon_h1"])
    assert layout.mode == "rows" and len(layout.calls) == 4
    first = [spec for spec in layout.states if spec.layer == 0]
    assert first == [
        StateSpec(0, 0, "conv", (64 + 2 * 8, 4), False),
        StateSpec(0, 0, "recurrent", (4, 16, 8), True),
    ]
    assert layout.state_bytes(2) == 4 * (2 * 80 * 4 + 4 * 512)
    layers = {spec.layer: spec.kind for spec in recording.record(folders["lfm2"]).states}
    assert layers == {0: "conv", 2: "conv"}
    mamba = recording.record(folders["mamba"])
    assert not mamba.calls and not mamba.lacks
    assert all("dt_proj" in name for name in mamba.read) and len(mamba.read) == 4


def test_states_have_room_before_keys_and_values(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(folders["granite4"], max_running_requests=9, num_kv_tokens=None)
    one_request = config.model.state_bytes(4)
    need = memory_of(config)
    assert need.states() == 10 * one_request > 0
    assert need.stated(7) == need.weights() + need.states() + 7 * need.per_token()
    free = need.weights() + need.states() + 100 * need.per_token()
    monkeypatch.setattr("engine.worker.sizing.estimate.available_host_bytes", lambda: free)
    full = changed(config, memory_fraction=1.0)
    assert profile_max_tokens(full) == 100
    with pytest.raises(ConfigError, match=r"lower max_running_requests \(500\)"):
        profile_max_tokens(changed(full, max_running_requests=500))
    runner = make_runner(str(folders["granite4"]), max_running_requests=9)
    assert isinstance(runner.model, RowModel)
    assert runner.model.rows.pool.num_bytes == need.states()


def test_a_model_without_attention_takes_no_kv_memory(folders: dict[str, Path]) -> None:
    config = make_config(folders["mamba2"])
    assert memory_of(config).per_token() == 0
    assert profile_max_tokens(config) > config.max_kv_tokens
    assert make_runner(str(folders["mamba2"])).kv_bytes_per_token == 0


def test_the_prefix_cache_is_off_and_said_to_be(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    resolved = EngineConfig(model=str(folders["lfm2"]), device="cpu").resolve()
    assert not resolved.engine.enable_prefix_cache
    with caplog.at_level("INFO", logger="engine.worker.auto_config"):
        make_worker_config(resolved)
    (line,) = (r.getMessage() for r in caplog.records if "prefix cache" in r.getMessage())
    assert line.startswith("Lfm2ForCausalLM, by transformers, keeps states of requests")


@pytest.mark.parametrize("name", ["jamba", "granite4"])
def test_code_that_begins_anew_takes_one_token_at_a_time(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    driver = StepDriver(make_runner(str(folders[name])))
    told = [r for r in caplog.records if "one token at a time" in r.getMessage()]
    assert bool(told) == (name == "jamba")
    assert isinstance(driver.runner.model, RowModel)
    steps = driver.runner.model.rows
    a, b, c = (driver.add(SHARED[:20]) for _ in range(3))
    driver.run([(a, 6), (b, 6)], [])
    batch = driver.runner.prepare(driver.build([(a, 3), (c, 1)], [b]))
    sizes = [(part.batch_size, part.num_tokens) for part in steps.parts(batch)]
    assert sizes == ([(1, 1)] * 3 if name == "jamba" else [(1, 3)]) + [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tp_size": 2}, "Lfm2ForCausalLM, by transformers, keeps states .* set tp_size: 1"),
        ({"pp_size": 2}, "keeps states of requests beside attention, which can't be divided yet"),
        (
            {"speculative_config": {"method": "ngram"}},
            "keeps states of requests .* drafts can't go back in; leave speculative_config out",
        ),
    ],
)
def test_what_states_do_not_allow_is_refused(
    folders: dict[str, Path], keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(EngineConfig, {"model": str(folders["lfm2"]), **keys}).resolve()


def test_a_draft_model_with_states_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    make_model(tmp_path, "LlamaForCausalLM")
    drafts = {"model": str(folders["lfm2"])}
    engine = load_config(EngineConfig, {"model": str(tmp_path), "speculative_config": drafts})
    with pytest.raises(ConfigError, match=r"keeps states of requests .* choose another model"):
        engine.resolve()


class ForgetfulConfig(transformers.Mamba2Config):
    """Of an architecture whose decodes take no notice of what came before."""

    model_type = "manta_test_forgetful"


class ForgetfulModel(transformers.Mamba2Model):
    """It leaves states and never reads them."""

    config_class = ForgetfulConfig

    def forward(self, input_ids: Any = None, cache_params: Any = None, **kwargs: Any) -> Any:
        if cache_params is not None:
            for layer in cache_params.layers:
                layer.has_previous_state[0] = False
        return super().forward(input_ids, cache_params=cache_params, **kwargs)


class ForgetfulForCausalLM(transformers.Mamba2ForCausalLM):
    """With a head."""

    config_class = ForgetfulConfig

    def __init__(self, config: ForgetfulConfig) -> None:
        super().__init__(config)
        self.backbone = ForgetfulModel(config)
        self.post_init()


def test_states_that_cannot_be_continued_are_noticed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    transformers.AutoConfig.register("manta_test_forgetful", ForgetfulConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ForgetfulConfig, ForgetfulForCausalLM, exist_ok=True)
    shutil.copytree(folders["mamba2"], tmp_path, dirs_exist_ok=True)
    keys = {"model_type": "manta_test_forgetful", "architectures": ["ForgetfulForCausalLM"]}
    config = json.loads((tmp_path / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="ForgetfulForCausalLM keeps states of requests"):
        make_runner(str(tmp_path))
