"""Embeddings equal transformers' hidden states, pooled, however their prompts are scheduled.

They run in the same batches as requests that generate, whose tokens stay equal to transformers'.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from engine.loop.engine_core import EngineCore
from engine.protocol.messages import AbortRequest
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from tests.support.engines import (
    KV_TOKENS,
    Engine,
    engine_for,
    greedy_reference,
    load_reference,
    reference_states,
)
from tests.support.models import ARCHITECTURES, make_model
from tests.support.requests import add_request

CARRIED = Path(__file__).resolve().parents[2] / "models" / "manta-small"
MODELS = ["carried", *ARCHITECTURES]
MAX_NEW = 8
TOLERANCE = 1e-4
KINDS: tuple[Pooling | None, ...] = ("last", None, "mean")
LAYOUTS = [
    *((model, 1, 1, page) for model, page in zip(MODELS, itertools.cycle((1, 16)), strict=False)),
    ("carried", 2, 1, 16),
    ("qwen3", 1, 2, 1),
    ("mistral", 2, 2, 16),
]
# (chunk, cache, retract, overlap): every pair of values meets.
VARIANTS = [
    (-1, False, 0, False),
    (-1, True, 4, True),
    (32, False, 4, True),
    (32, True, 0, True),
    (32, True, 4, False),
]


class Case:
    """Prompts, each to be continued and pooled both ways, and what transformers makes of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        reference = load_reference(path)
        vocab = reference.config.vocab_size
        rng = random.Random(5)
        self.shared = [rng.randrange(3, vocab) for _ in range(48)]
        lengths = (1, 17, 70, 100)
        prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
        prompts += [self.shared + prompts[1], self.shared[:33]]
        states = [reference_states(reference, ids) for ids in prompts]
        tokens = greedy_reference(reference, prompts, MAX_NEW)
        self.prompts = [ids for ids in prompts for _ in KINDS]
        self.pooling = list(KINDS) * len(prompts)
        self.tokens = [out if kind is None else [] for out in tokens for kind in KINDS]
        self.vectors = {
            number: states[i][-1] if kind == "last" else states[i].mean(axis=0)
            for number, (i, kind) in enumerate(itertools.product(range(len(prompts)), KINDS))
            if kind is not None
        }

    def check(self, engine: Engine, tokens: list[list[int]], what: str) -> None:
        assert tokens == self.tokens, what
        assert engine.embeddings.keys() == self.vectors.keys(), what
        for number, vector in self.vectors.items():
            found = engine.embeddings[number]
            assert found.dtype == np.float32
            assert np.allclose(found, vector, rtol=TOLERANCE, atol=TOLERANCE), (what, number)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    transformers.utils.logging.set_verbosity_error()

    class Lazy(dict[str, Case]):
        def __missing__(self, name: str) -> Case:
            path = CARRIED
            if name != "carried":
                arch, overrides = ARCHITECTURES[name]
                folder = tmp_path_factory.mktemp(name)
                path = make_model(folder, arch, num_hidden_layers=4, **overrides)
            self[name] = made = Case(path)
            return made

    yield Lazy()


GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(("model", "tp", "pp", "page"), LAYOUTS)
def test_equals_transformers(
    cases: dict[str, Case], model: str, tp: int, pp: int, page: int
) -> None:
    case = cases[model]
    with engine_for(case.path, tp_size=tp, pp_size=pp, page_size=page) as engine:
        for chunk, cache, retract, overlap in VARIANTS:
            what = f"{chunk=} {cache=} {retract=} {overlap=}"
            out = engine.run(
                case.prompts,
                GREEDY,
                pooling=case.pooling,
                warm=[case.shared] if cache else (),
                retract_every=retract,
                chunked_prefill_size=chunk,
                enable_prefix_cache=cache,
                enable_overlap=overlap,
                enable_mixed_chunk=chunk > 0,
            )
            case.check(engine, out, what)
            assert bool(engine.retractions) == bool(retract), what
            hits = [engine.cached[i] for i in range(len(out)) if case.pooling[i] == "last"]
            assert bool(sum(hits)) == cache, what
            means = [engine.cached[i] for i in range(len(out)) if case.pooling[i] == "mean"]
            assert sum(means) == 0, what
            generated = MAX_NEW * case.pooling.count(None)
            assert engine.stats.generation_tokens_total == generated + bool(cache), what


def test_with_the_torch_backend(cases: dict[str, Case]) -> None:
    """The other layout of the last layer: all of its tokens are there, not only the last ones."""
    case = cases["qwen2"]
    with engine_for(case.path, page_size=4, attention_backend="torch") as engine:
        for chunk in (-1, 32):
            out = engine.run(
                case.prompts,
                GREEDY,
                pooling=case.pooling,
                chunked_prefill_size=chunk,
                enable_mixed_chunk=chunk > 0,
            )
            case.check(engine, out, f"{chunk=}")


@pytest.mark.parametrize("pp", [1, 2])
def test_little_kv_room(cases: dict[str, Case], pp: int) -> None:
    """Requests give way to each other."""
    case = cases["llama"]
    with engine_for(case.path, pp_size=pp, page_size=4, max_model_len=160) as engine:
        params = SamplingParams(max_tokens=60, temperature=0)  # ignore_eos would reserve all of it
        out = engine.run(
            case.prompts,
            params,
            pooling=case.pooling,
            kv_tokens=160,
            chunked_prefill_size=16,
            enable_mixed_chunk=True,
            schedule_conservativeness=0.01,
        )
        assert engine.stats.retractions_total > 0
        case.check(engine, [tokens[:MAX_NEW] for tokens in out], "small")


def test_bfloat16(cases: dict[str, Case]) -> None:
    """Vectors are float32, and as near as the type allows."""
    case = cases["carried"]
    with engine_for(case.path, dtype="bfloat16", page_size=16) as engine:
        engine.run(case.prompts, GREEDY, pooling=case.pooling, chunked_prefill_size=32)
        for number, vector in case.vectors.items():
            found = engine.embeddings[number]
            assert found.dtype == np.float32
            cosine = found @ vector / np.linalg.norm(found) / np.linalg.norm(vector)
            assert cosine > 0.999, (number, cosine)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("pp", [1, 2])
def test_aborts_leave_nothing(cases: dict[str, Case], pooling: Pooling, pp: int) -> None:
    """After each step of a long prompt it is aborted, and what runs beside it and next is right."""
    case = cases["llama"]
    pooled = [i for i in case.vectors if case.pooling[i] == pooling]
    numbers = sorted(pooled, key=lambda i: len(case.prompts[i]))[:-3:-1]
    config = {"chunked_prefill_size": 16, "page_size": 4}
    with engine_for(case.path, pp_size=pp, **config) as engine:
        completed = []
        for steps in range(1, 11):
            sched = Scheduler(SchedulerConfig(engine.resolved, KV_TOKENS))
            core = EngineCore(sched, engine.executor)
            for rid, number in enumerate(numbers):
                ids = np.asarray(case.prompts[number], np.int32)
                params = SamplingParams(temperature=0)
                sched.add(
                    add_request(rid=rid, input_ids=ids, params=params, pooling=pooling),
                    core.clock(),
                )
            found: dict[int, bytes] = {}
            for step in itertools.count(1):
                for _, out in core.step():
                    found |= out.embeddings or {}
                if step == steps:
                    assert sched.check_invariants() is None
                    completed.append(0 in found)
                    sched.abort(AbortRequest(rid=0))
                if sched.is_idle:
                    break
            sched.on_idle()
            assert sched.stats.kv_leaks_total == 0
            assert sched.kv.tree.protected_size == 0
            assert (0 in found) == completed[-1]
            vector = np.frombuffer(found[1], np.float32)
            assert np.allclose(vector, case.vectors[numbers[1]], atol=TOLERANCE)
        assert completed.count(False) >= 6 and completed[-1]
