"""Speculation changes nothing but the number of steps.

Outputs equal those of transformers (greedy, float32), or those of the same engine without
speculation, for every drafter. `make test` runs a covering subset, `make test-matrix` the product.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.config import EngineConfig, load_config
from engine.constraints import ConstraintSpec, structured
from engine.errors import ConfigError
from engine.protocol.sampling_params import SamplingParams
from tests.support.drafters import OUTPUTS
from tests.support.engines import Engine, engine_for, greedy_reference, load_reference
from tests.support.models import ARCHITECTURES, make_model

CARRIED = Path(__file__).resolve().parents[2] / "models" / "manta-small"
MAX_NEW = 24
LOGPROB_TOLERANCE = 1e-4
DRAFTERS = {
    "ngram": "ngram",
    "suffix": "suffix",
    "random": "tests.support.drafters:RandomDrafter",
    "right": "tests.support.drafters:RightUntilError",
}
MODELS = ("carried", "mistral", "qwen3")
LAYOUTS = ((1, 1), (2, 1), (1, 2))
# (model, drafter, k, page, tp, pp) of the subset.
SUBSET = {
    ("carried", "ngram", 4, 16, 1, 1),
    ("carried", "ngram", 8, 1, 2, 1),
    ("carried", "right", 4, 16, 1, 2),
    ("carried", "right", 1, 1, 1, 1),
    ("carried", "suffix", 8, 16, 1, 1),
    ("carried", "random", 4, 1, 1, 1),
    ("mistral", "right", 8, 16, 1, 1),
    ("mistral", "random", 1, 16, 2, 1),
    ("mistral", "ngram", 4, 1, 1, 2),
    ("qwen3", "right", 4, 1, 2, 1),
    ("qwen3", "suffix", 1, 1, 1, 1),
}
# (chunk, retract, overlap, draft_length): every pair of values meets.
SCHEDULES = [
    (-1, 0, False, "fixed"),
    (-1, 4, True, "adaptive"),
    (32, 4, False, "adaptive"),
    (32, 0, True, "fixed"),
    (32, 4, True, "fixed"),
]
FORCES = {
    "type": "object",
    "properties": {"first_name": {"enum": ["Ada", "Bob"]}, "kind": {"const": "a kind of person"}},
    "required": ["first_name", "kind"],
    "additionalProperties": False,
}
LIST_A, LIST_B = [40, 41, 42, 43, 44], [40, 41, 50]
PARAMS: dict[str, SamplingParams] = {
    "sampled": SamplingParams(max_tokens=MAX_NEW, seed=5, logprobs=2),
    "cold": SamplingParams(max_tokens=MAX_NEW, temperature=0.3, top_p=0.8, seed=1),
    "top_k": SamplingParams(max_tokens=MAX_NEW, temperature=0.7, top_k=4, min_p=0.02, seed=2),
    "penalties": SamplingParams(
        max_tokens=MAX_NEW,
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
    ),
    "sampled penalties": SamplingParams(
        max_tokens=MAX_NEW, temperature=0.6, seed=9, frequency_penalty=1.5, logprobs=0
    ),
    "bias": SamplingParams(max_tokens=MAX_NEW, temperature=0, logit_bias={7: 4.0, 9: -50.0}),
    "listed": SamplingParams(
        max_tokens=MAX_NEW, temperature=0, logprobs=3, logprob_token_ids=[3, 5]
    ),
    "prompt": SamplingParams(max_tokens=MAX_NEW, temperature=0, logprobs=1, prompt_logprobs=1),
    "bad words": SamplingParams(max_tokens=MAX_NEW, temperature=0, bad_words_ids=[[11], [12, 13]]),
    "choice": SamplingParams(
        max_tokens=MAX_NEW,
        temperature=0,
        constraint=ConstraintSpec("token_choice", {"choices": [LIST_A, LIST_B]}),
    ),
    "schema": SamplingParams(
        max_tokens=40,
        temperature=0,
        logprobs=1,
        constraint=structured.json_schema(FORCES, any_whitespace=False),
    ),
    "sampled schema": SamplingParams(
        max_tokens=40, temperature=1.0, seed=7, constraint=structured.json_schema(FORCES)
    ),
    "cut regex": SamplingParams(
        max_tokens=9, temperature=0, constraint=structured.regex("always the same [a-z]+ text")
    ),
    "regex without eos": SamplingParams(
        max_tokens=40, seed=4, ignore_eos=True, constraint=structured.regex("[ab] end of it all")
    ),
}


class Case:
    """A model, prompts that repeat themselves in parts, and what transformers makes of them."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        reference = load_reference(path)
        vocab = reference.config.vocab_size
        rng = random.Random(3)
        stem = [rng.randrange(3, vocab) for _ in range(20)]
        self.prompts = [
            [rng.randrange(3, vocab)],
            stem * 3 + [5],
            stem + [rng.randrange(3, vocab) for _ in range(30)] + stem,
            [rng.randrange(3, vocab) for _ in range(17)],
            [7, 8, 9] * 12,
        ]
        self.expected = greedy_reference(reference, self.prompts, MAX_NEW)
        self.outputs = folder / f"{path.name}.json"
        self.tell(self.expected)

    def tell(self, outputs: Sequence[Sequence[int]]) -> None:
        """The outputs that `RightUntilError` guesses from now on."""
        known = [p + list(out) for p, out in zip(self.prompts, outputs, strict=True)]
        self.outputs.write_text(json.dumps(known))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    transformers.utils.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("outputs")

    class Lazy(dict[str, Case]):
        def __missing__(self, name: str) -> Case:
            path = CARRIED
            if name != "carried":
                arch, overrides = ARCHITECTURES[name]
                made = tmp_path_factory.mktemp(name)
                path = make_model(made, arch, num_hidden_layers=4, **overrides)
            self[name] = Case(path, folder)
            return self[name]

    yield Lazy()


def speculative(drafter: str, count: int, **more: Any) -> dict[str, Any]:
    return {"method": DRAFTERS[drafter], "num_speculative_tokens": count, **more}


def accepted(engine: Engine) -> int:
    return engine.stats.spec_decode_accepted_tokens_total


@pytest.mark.parametrize(
    ("model", "drafter", "count", "page", "tp", "pp"),
    [
        (*most, *layout)
        for *most, layout in itertools.product(MODELS, DRAFTERS, (1, 4, 8), (1, 16), LAYOUTS)
    ],
)
def test_greedy_equals_transformers(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    cases: dict[str, Case],
    model: str,
    drafter: str,
    count: int,
    page: int,
    tp: int,
    pp: int,
) -> None:
    full = request.config.getoption("--full-matrix")
    if not full and (model, drafter, count, page, tp, pp) not in SUBSET:
        pytest.skip("not in the covering subset (make test-matrix runs it)")
    case = cases[model]
    case.tell(case.expected)
    monkeypatch.setenv(OUTPUTS, str(case.outputs))
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    config = {"tp_size": tp, "pp_size": pp, "page_size": page}
    drafts = speculative(drafter, count)
    with engine_for(case.path, speculative_config=drafts, **config) as engine:
        for chunk, retract, overlap, length in SCHEDULES:
            got = engine.run(
                case.prompts,
                params,
                retract_every=retract,
                chunked_prefill_size=chunk,
                enable_overlap=overlap,
                speculative_config=engine.config.speculative_config.model_copy(
                    update={"draft_length": length}
                ),
            )
            variant = f"chunk={chunk} retract={retract} overlap={overlap} {length}"
            assert got == case.expected, variant
            assert not retract or engine.retractions > 0, variant
            if length == "fixed" and drafter == "right":
                assert accepted(engine) > 20, variant
            if length == "fixed" and drafter == "random":
                assert engine.stats.spec_decode_draft_tokens_total > 20, variant


@pytest.fixture(scope="module")
def plain(cases: dict[str, Case]) -> Iterator[Engine]:
    with engine_for(cases["carried"].path, page_size=16) as engine:
        yield engine


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_every_parameter(
    cases: dict[str, Case], plain: Engine, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Tokens, log-probabilities and ends are those without speculation."""
    case = cases["carried"]
    monkeypatch.setenv(OUTPUTS, str(case.outputs))
    names = list(PARAMS)
    prompts = [case.prompts[i % len(case.prompts)] for i in range(len(names))]
    params = [PARAMS[name] for name in names]
    stop_after = {names.index("bias"): 7}
    want = plain.run(prompts, params, stop_after=stop_after)
    logprobs, prompt_logprobs = plain.logprobs, plain.prompt_logprobs
    known = [p + list(out) for p, out in zip(prompts, want, strict=True)]
    case.outputs.write_text(json.dumps(known))
    config = dict(page_size=16, attention_backend=backend, sampling_backend=backend)
    drafts = speculative("right", 4, draft_length="fixed")
    with engine_for(case.path, speculative_config=drafts, **config) as engine:
        for overlap, chunk in itertools.product((True, False), (-1, 32)):
            got = engine.run(
                prompts,
                params,
                stop_after=stop_after,
                enable_overlap=overlap,
                chunked_prefill_size=chunk,
            )
            for name, ours, theirs in zip(names, got, want, strict=True):
                assert ours == theirs, (name, overlap, chunk)
            assert accepted(engine) > 40
            assert engine.logprobs.keys() == logprobs.keys()
            for rid, entries in logprobs.items():
                for mine, other in zip(engine.logprobs[rid], entries, strict=True):
                    assert abs(mine.logprob - other.logprob) < LOGPROB_TOLERANCE, names[rid]
                    assert mine.top_ids == other.top_ids, names[rid]
            assert engine.prompt_logprobs.keys() == prompt_logprobs.keys()


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
def test_drafts_that_constraints_give(
    cases: dict[str, Case], plain: Engine, layout: tuple[int, int]
) -> None:
    """The outputs are the same, in fewer steps, also beside rows that a drafter drafts for."""
    case = cases["carried"]
    forced = [PARAMS[n] for n in ("schema", "sampled schema", "cut regex", "regex without eos")]
    params = [*forced, PARAMS["choice"], SamplingParams(max_tokens=MAX_NEW, temperature=0)]
    prompts = [case.prompts[i % len(case.prompts)] for i in range(len(params))]
    want = plain.run(prompts, params)
    config = dict(tp_size=layout[0], pp_size=layout[1], page_size=16)
    drafts = speculative("ngram", 4)
    with engine_for(case.path, speculative_config=drafts, **config) as engine:
        for overlap, retract in itertools.product((True, False), (0, 4)):
            got = engine.run(prompts, params, enable_overlap=overlap, retract_every=retract)
            assert got == want, (overlap, retract)
            assert accepted(engine) > 8
        alone = engine.run(prompts[:1], params[:1])
        assert alone == want[:1]
        assert accepted(engine) >= 4 and engine.stats.steps_total < len(want[0])


def test_stop_tokens_and_min_tokens(
    cases: dict[str, Case], plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop token in the middle of an accepted run ends the output there."""
    case = cases["carried"]
    monkeypatch.setenv(OUTPUTS, str(case.outputs))
    case.tell(case.expected)
    params = []
    for index, out in enumerate(case.expected):
        stop = out[6 + index]
        least = 10 if index % 2 else 0
        params.append(
            SamplingParams(
                max_tokens=MAX_NEW, temperature=0, stop_token_ids=[stop], min_tokens=least
            )
        )
    want = plain.run(case.prompts, params)
    assert any(len(out) < MAX_NEW for out in want)
    drafts = speculative("right", 8, draft_length="fixed")
    with engine_for(case.path, page_size=16, speculative_config=drafts) as engine:
        for overlap in (True, False):
            assert engine.run(case.prompts, params, enable_overlap=overlap) == want, overlap
            assert accepted(engine) > 4


def test_streams_go_on_elsewhere(
    cases: dict[str, Case], plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of an engine that speculates go on at one that doesn't, and the other way round, at
    any token."""
    case = cases["carried"]
    monkeypatch.setenv(OUTPUTS, str(case.outputs))
    names = list(PARAMS)
    prompts = [case.prompts[i % len(case.prompts)] for i in range(len(names))]
    params = [PARAMS[name] for name in names]
    want = plain.run(prompts, params)
    case.outputs.write_text(
        json.dumps([p + list(out) for p, out in zip(prompts, want, strict=True)])
    )
    drafts = speculative("right", 4, draft_length="fixed")
    with engine_for(case.path, page_size=16, speculative_config=drafts) as engine:
        for first, second, shift in ((engine, plain, 0), (plain, engine, 3), (engine, engine, 5)):
            until = {i: 1 + (3 * i + shift) % (len(out) - 1) for i, out in enumerate(want)}
            begun = first.run(prompts, params, stop_after=until)
            assert [len(out) for out in begun] == list(until.values())
            rest = second.run(prompts, params, resumed=begun)
            for name, head, tail, whole in zip(names, begun, rest, want, strict=True):
                assert head + tail == whole, (name, shift)
        assert accepted(engine) > 40


def test_little_kv_room(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are retracted for want of room, and drafts fall away before that."""
    case = cases["carried"]
    monkeypatch.setenv(OUTPUTS, str(case.outputs))
    case.tell(case.expected)
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    drafts = speculative("right", 8, draft_length="fixed")
    config = dict(page_size=1, max_model_len=112, speculative_config=drafts)
    with engine_for(case.path, **config) as engine:
        for overlap in (True, False):
            got = engine.run(
                case.prompts * 4,
                params,
                kv_tokens=130,
                enable_overlap=overlap,
                schedule_conservativeness=0.01,
                enable_prefix_cache=False,
                max_total_tokens=None,
            )
            assert got == case.expected * 4


@pytest.mark.parametrize(("model", "tp"), [("carried", 1), ("carried", 2), ("mistral", 1)])
def test_a_draft_model(
    cases: dict[str, Case], tmp_path: Path, plain: Engine, model: str, tp: int
) -> None:
    """The carried model drafts for itself, and is always right, sampled too; another model drafts
    for the one with windows, and is hardly ever right."""
    case = cases[model]
    path = case.path
    if model != "carried":
        arch, overrides = ARCHITECTURES[model]
        path = make_model(tmp_path, arch, seed=1, num_hidden_layers=1, **overrides)
    drafts = {"model": str(path), "num_speculative_tokens": 4, "draft_length": "fixed"}
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(case.path, tp_size=tp, page_size=16, speculative_config=drafts) as engine:
        for chunk, retract in ((-1, 0), (32, 4)):
            got = engine.run(
                case.prompts, params, chunked_prefill_size=chunk, retract_every=retract
            )
            assert got == case.expected, (chunk, retract)
            checked = engine.stats.spec_decode_draft_tokens_total
            assert checked > 20
            if model == "carried" and not retract:
                assert accepted(engine) > 0.9 * checked
        if model == "carried":
            sampled = PARAMS["sampled"]
            assert engine.run(case.prompts, sampled) == plain.run(case.prompts, sampled)
            assert accepted(engine) > 0.9 * engine.stats.spec_decode_draft_tokens_total


def test_a_draft_model_that_does_not_fit(tmp_path: Path) -> None:
    arch, overrides = ARCHITECTURES["llama"]
    other = make_model(tmp_path, arch, **overrides)
    keys: dict[str, Any] = {"model": str(CARRIED), "speculative_config": {"model": str(other)}}
    with pytest.raises(ConfigError, match="vocabulary of 211 tokens"):
        load_config(EngineConfig, keys).resolve()
    own = {"model": str(CARRIED), "speculative_config": {"model": str(CARRIED)}}
    for more in ({"pp_size": 2}, {"enable_overlap": False}):
        with pytest.raises(ConfigError, match="needs pp_size: 1 and enable_overlap: true"):
            load_config(EngineConfig, own | more).resolve()


def test_room_for_drafts() -> None:
    """A request and the drafts of two steps must fit; without a stated length it gives way."""
    keys: dict[str, Any] = {
        "model": str(CARRIED),
        "max_total_tokens": 128,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    }
    assert load_config(EngineConfig, keys).resolve().max_model_len == 118
    with pytest.raises(ConfigError, match="and 10 tokens of drafts"):
        load_config(EngineConfig, keys | {"max_model_len": 119}).resolve()
    with pytest.raises(ConfigError, match="holds no request beside 10 tokens of drafts"):
        load_config(EngineConfig, keys | {"max_total_tokens": 10, "page_size": 1}).resolve()
