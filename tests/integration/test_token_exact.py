"""Greedy float32 output equals transformers' token by token, however it is scheduled.

Dimensions: model x tp x pp x page size (workers) x chunked prefill x prefix cache x forced
retraction x overlap (scheduler). `make test` runs a covering subset, `make test-matrix` all of it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import TokenLogprobs
from tests.support.engines import (
    Engine,
    engine_for,
    greedy_reference,
    load_reference,
    reference_logprobs,
)
from tests.support.models import ARCHITECTURES, make_model

CARRIED = Path(__file__).resolve().parents[2] / "models" / "manta-small"
MODELS = ["carried", *ARCHITECTURES]
MAX_NEW = 20
LOGPROB_TOLERANCE = 1e-4

# (model, tp, pp, page) of the subset: every model in one process with both page sizes, every
# parallel layout with the carried model, and layouts spread over the architectures.
SUBSET = {(m, 1, 1, p) for m in MODELS for p in (1, 16)} | {
    ("carried", 2, 1, 16),
    ("carried", 1, 2, 1),
    ("carried", 2, 2, 16),
    ("qwen2", 2, 1, 1),
    ("qwen3", 2, 2, 16),
    ("mistral", 1, 2, 16),
    ("qwen2", 1, 4, 16),
}
# (chunk, cache, retract, overlap): with worker processes, where a run costs seconds, rows in which
# every pair of values meets; in one process, and in the full matrix, all 16.
PAIRWISE = {
    (-1, False, 0, False),
    (-1, True, 4, True),
    (32, False, 4, True),
    (32, True, 0, True),
    (32, True, 4, False),
}
# (chunk, retract, overlap, log-probabilities of the prompt, too)
LOGPROB_VARIANTS = [
    (-1, 0, False, True),
    (-1, 3, True, False),
    (32, 0, True, False),
    (32, 3, False, False),
    (32, 3, True, True),
]
LAYOUTS = [
    *itertools.product(MODELS, (1, 2), (1, 2), (1, 16)),
    *((model, 1, 4, 16) for model in MODELS),
]


class Case:
    """A model with its oracle, prompts and expected outputs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reference = load_reference(path)
        vocab = self.reference.config.vocab_size
        rng = random.Random(7)
        shared = [rng.randrange(3, vocab) for _ in range(48)]
        self.prompts = [
            [rng.randrange(3, vocab)],
            [rng.randrange(3, vocab) for _ in range(17)],
            shared + [rng.randrange(3, vocab) for _ in range(9)],
            shared + [rng.randrange(3, vocab) for _ in range(40)],
            shared[:33],
            [rng.randrange(3, vocab) for _ in range(70)],
        ]
        self.warm = [shared]
        self.expected = greedy_reference(self.reference, self.prompts, MAX_NEW)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    transformers.utils.logging.set_verbosity_error()
    made: dict[str, Case] = {}

    class Lazy(dict[str, Case]):
        def __missing__(self, name: str) -> Case:
            if name == "carried":
                path = CARRIED
            else:
                arch, overrides = ARCHITECTURES[name]
                path = make_model(
                    tmp_path_factory.mktemp(name),
                    arch,
                    num_hidden_layers=4,
                    **overrides,
                )
            made[name] = self[name] = Case(path)
            return made[name]

    yield Lazy()


def test_oracle_is_sensitive(cases: dict[str, Case]) -> None:
    """The expected outputs differ between prompts and within one: equality means something."""
    for name in MODELS[1:]:
        expected = cases[name].expected
        assert len({tuple(e) for e in expected}) == len(expected), name
        assert sum(len(set(e)) > 3 for e in expected) >= 4, (name, expected)


@pytest.mark.parametrize(("model", "tp", "pp", "page"), LAYOUTS)
def test_greedy_equals_transformers(
    request: pytest.FixtureRequest,
    cases: dict[str, Case],
    model: str,
    tp: int,
    pp: int,
    page: int,
) -> None:
    full = request.config.getoption("--full-matrix")
    if not full and (model, tp, pp, page) not in SUBSET:
        pytest.skip("not in the covering subset (make test-matrix runs it)")
    case = cases[model]
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(case.path, tp_size=tp, pp_size=pp, page_size=page) as engine:
        for chunk, cache, retract, overlap in itertools.product(
            (-1, 32), (False, True), (0, 4), (False, True)
        ):
            if tp * pp > 1 and not full and (chunk, cache, retract, overlap) not in PAIRWISE:
                continue
            variant = f"chunk={chunk} cache={cache} retract={retract} overlap={overlap}"
            out = engine.run(
                case.prompts,
                params,
                warm=case.warm if cache else (),
                retract_every=retract,
                chunked_prefill_size=chunk,
                enable_prefix_cache=cache,
                enable_overlap=overlap,
                enable_mixed_chunk=chunk > 0,
            )
            assert out == case.expected, variant
            hits = sum(engine.cached.get(i, 0) for i in range(len(case.prompts)))
            assert (hits >= 2 * 32) == cache, (variant, engine.cached)
        _check_logprobs(case, engine)


@pytest.mark.parametrize(("pp", "depth"), [(1, 0), (2, 0), (2, 2), (4, 1)])
def test_storm_on_real_workers(cases: dict[str, Case], pp: int, depth: int) -> None:
    """Many requests, half of them stopped by their clients, retractions all the time, steps in
    flight: what is left is untouched, what was stopped is a prefix."""
    case = cases["llama"]
    rng = random.Random(pp)
    count = 20
    order = [rng.randrange(len(case.prompts)) for _ in range(count)]
    prompts = [case.prompts[i] for i in order]
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(case.path, pp_size=pp, pp_async_depth=depth, page_size=4) as engine:
        for chunk, retract_every in ((32, 3), (-1, 5)):
            stop_after = {i: rng.randrange(1, MAX_NEW) for i in range(0, count, 2)}
            out = engine.run(
                prompts,
                params,
                retract_every=retract_every,
                stop_after=stop_after,
                chunked_prefill_size=chunk,
                enable_mixed_chunk=chunk > 0,
            )
            assert engine.retractions > 3
            for i, tokens in enumerate(out):
                expected = case.expected[order[i]]
                assert tokens == expected[: stop_after.get(i, MAX_NEW)], (i, chunk)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [3, 8])
def test_flex_requests_get_the_same_tokens(
    cases: dict[str, Case], overlap: bool, rows: int
) -> None:
    """With little room, so that they pause and are retracted beside others, which get theirs."""
    case = cases["llama"]
    count = len(case.prompts)
    params = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)
    with engine_for(case.path, page_size=4) as engine:
        out = engine.run(
            case.prompts * 3,
            params,
            flex=range(2 * count),
            retract_every=7,
            chunked_prefill_size=32,
            max_running_requests=rows,
            enable_overlap=overlap,
        )
        assert out == case.expected * 3


def _check_logprobs(case: Case, engine: Engine) -> None:
    """Of output and prompt against log_softmax: in chunks, after retractions, with overlap; those
    of the output with cache hits, too (the prompt's have to compute all of it)."""
    for chunk, retract, overlap, of_prompt in LOGPROB_VARIANTS:
        variant = f"{chunk=} {retract=} {overlap=} {of_prompt=}"
        params = SamplingParams(
            max_tokens=6,
            temperature=0,
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=2 if of_prompt else None,
        )
        out = engine.run(
            case.prompts,
            params,
            warm=case.warm,
            retract_every=retract,
            chunked_prefill_size=chunk,
            enable_overlap=overlap,
            enable_mixed_chunk=chunk > 0,
        )
        assert engine.retractions > 0 or not retract, variant
        hits = sum(engine.cached.get(i, 0) for i in range(len(case.prompts)))
        assert of_prompt or hits >= 2 * 32, (variant, engine.cached)
        assert out == [expected[:6] for expected in case.expected], variant
        for i, prompt in enumerate(case.prompts):
            want = reference_logprobs(case.reference, prompt + out[i])
            assert len(engine.logprobs[i]) == len(out[i]), variant
            for k, got in enumerate(engine.logprobs[i]):
                _check_entry(got, out[i][k], want[len(prompt) - 1 + k], 3, variant)
            if of_prompt:
                first, *rest = engine.prompt_logprobs[i]
                assert first is None and len(rest) == len(prompt) - 1
                for k, entry in enumerate(rest):
                    assert entry is not None
                    _check_entry(entry, prompt[k + 1], want[k], 2, variant)
            else:
                assert i not in engine.prompt_logprobs


def _check_entry(got: TokenLogprobs, token: int, want: np.ndarray, top: int, variant: str) -> None:
    """`want`: log-probabilities [vocab] of all tokens at the position."""
    assert abs(got.logprob - want[token]) < LOGPROB_TOLERANCE, variant
    assert len(set(got.top_ids)) == len(got.top_ids) == top, variant
    assert np.allclose(got.top_logprobs, np.sort(want)[::-1][:top], atol=LOGPROB_TOLERANCE), variant
    assert np.allclose(got.top_logprobs, want[list(got.top_ids)], atol=LOGPROB_TOLERANCE), variant


SAMPLED = [
    SamplingParams(max_tokens=MAX_NEW, temperature=0.9, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=MAX_NEW, temperature=1.2, top_k=20, seed=-5, ignore_eos=True),
    SamplingParams(max_tokens=MAX_NEW, temperature=0.8, top_p=0.9, seed=2**62, ignore_eos=True),
    SamplingParams(
        max_tokens=MAX_NEW,
        temperature=1.0,
        min_p=0.02,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        ignore_eos=True,
    ),
]


@pytest.mark.parametrize("model", ["carried", "qwen3"])
def test_sampled_is_the_same_anywhere(cases: dict[str, Case], model: str) -> None:
    """Alone, in a batch of 32, with other page sizes and tp, chunked, and after retractions."""
    case = cases[model]
    prompts = case.prompts[2:6]
    with engine_for(case.path, page_size=16) as engine:
        alone = [engine.run([p], [s])[0] for p, s in zip(prompts, SAMPLED, strict=True)]
        assert len({tuple(a) for a in alone}) == 4
        filler = [case.prompts[i % 6][: 5 + i] or [5] for i in range(28)]
        others = [
            SamplingParams(max_tokens=5 + i, temperature=1, seed=i, ignore_eos=True)
            for i in range(28)
        ]
        crowd = engine.run(filler + prompts, others + SAMPLED)[28:]
        assert crowd == alone
        retracted = engine.run(prompts, SAMPLED, retract_every=3, chunked_prefill_size=32)
        assert retracted == alone
    with engine_for(case.path, page_size=1, tp_size=2) as engine:
        assert engine.run(prompts, SAMPLED, enable_overlap=False) == alone
