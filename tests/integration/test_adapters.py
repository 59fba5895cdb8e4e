"""Requests with adapters give what transformers gives on merged weights, token by token."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.adapter_store import take_adapter
from engine.errors import ConfigError, RequestError
from engine.llm import LLM
from engine.protocol.sampling_params import SamplingParams
from tests.support.adapters import ALL, ATTENTION, make_adapter, merge
from tests.support.engines import (
    Engine,
    engine_for,
    greedy_reference,
    load_reference,
    reference_logprobs,
)
from tests.support.models import ARCHITECTURES, THROUGH_TRANSFORMERS, WITH_STATES, make_model

MAX_NEW = 12
TOLERANCE = 1e-4
KINDS = {**ARCHITECTURES, **THROUGH_TRANSFORMERS, **WITH_STATES}
FUSED = (*ALL, "qkv_proj", "gate_up_proj", "query_key_value", "dense")
VARIANTS: dict[str, dict[str, Any]] = {
    "a": {"rank": 1, "targets": ATTENTION, "lora_alpha": 3},
    "b": {"rank": 16, "lora_alpha": 32, "use_rslora": True},
    "c": {
        "rank": 6,
        "lora_alpha": 6,
        "targets": ("q_proj", "o_proj", "down_proj", "up_proj"),
        "rank_pattern": {"0.self_attn.q_proj": 64},
        "alpha_pattern": {"o_proj": 2},
    },
    "d": {"rank": 64, "lora_alpha": 16},
}
EXPERTS = {
    "qwen3_moe": {"a": "all", "b": "single", "c": "exchanged"},
    "gpt_oss": {"a": "all", "c": "all"},
    "mixtral": {"a": "single", "b": "all"},
}
"""How adapters have matrices for experts, by kind of model. Others of that kind have none."""
SENSITIVE = ("gpt_oss", "mixtral")
"""Whose log-probabilities in float32 differ from those in float64 by more than the tolerance with
larger adapters, in transformers too."""


class Case:
    """A model with adapters, prompts, and what is expected of each."""

    def __init__(self, folder: Path, kind: str) -> None:
        architecture, keys = KINDS[kind]
        self.model = make_model(folder / "model", architecture, **{"num_hidden_layers": 4, **keys})
        own = load_reference(self.model)
        self.keeps_states = kind in WITH_STATES
        """Then the model's code computes a prompt in other sums than single tokens."""
        is_fused = not any(name.endswith("q_proj") for name, _ in own.named_modules())
        self.adapters: dict[str, str] = {}
        self.merged = {None: own}
        for seed, (name, given) in enumerate(VARIANTS.items()):
            values = {**given, "targets": FUSED, "rank_pattern": {}} if is_fused else dict(given)
            if kind in EXPERTS:
                values["experts"] = EXPERTS[kind].get(name, "")
            if kind in SENSITIVE:
                values["size"] = 0.1
            at = make_adapter(folder / name, own, seed=seed, **values)
            self.adapters[name] = str(at)
            self.merged[name] = merge(load_reference(self.model), at)
        vocab, rng = own.config.vocab_size, random.Random(5)
        shared = [rng.randrange(3, vocab) for _ in range(40)]
        self.names = [None, "a", "b", "c", "d", "b", None, "a", "c"]
        self.prompts = [
            shared[:33] if n % 3 else [rng.randrange(3, vocab) for _ in range(5 + 11 * n)]
            for n in range(len(self.names))
        ]
        self.expected = [
            greedy_reference(self.merged[name], [ids], MAX_NEW)[0]
            for name, ids in zip(self.names, self.prompts, strict=True)
        ]
        plain = greedy_reference(own, self.prompts, MAX_NEW)
        changed = [a != b for a, b in zip(self.expected, plain, strict=True)]
        assert sum(changed) >= 5, "the adapters change little: equality would mean nothing"

    def llm(self, **keys: Any) -> LLM:
        values = dict(max_total_tokens=2048, max_model_len=256, dtype="float32", cpu_threads=1)
        return LLM(str(self.model), **{"lora_adapters": self.adapters, **values, **keys})

    def check(self, retract_every: int = 0, resume: int = 0, **keys: Any) -> Engine:
        """Twice, so that the second time there are cached prefixes. The engine, stopped."""
        refs = {name: take_adapter(name, Path(at), 64) for name, at in self.adapters.items()}
        with engine_for(self.model, lora_adapters=self.adapters, **keys) as engine:
            for n, wants_logprobs in enumerate((True, False)):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=MAX_NEW,
                    ignore_eos=True,
                    logprobs=0 if wants_logprobs else None,
                )
                found = engine.run(
                    self.prompts,
                    params,
                    adapters=[None if name is None else refs[name] for name in self.names],
                    retract_every=retract_every,
                    resumed=[want[: resume * n] for want in self.expected],
                )
                assert found == [want[resume * n :] for want in self.expected]
                if wants_logprobs and not self.keeps_states:
                    self.check_logprobs(engine)
        return engine

    def check_logprobs(self, engine: Engine) -> None:
        for n, (name, ids, want) in enumerate(
            zip(self.names, self.prompts, self.expected, strict=True)
        ):
            whole = [*ids, *want]
            table = reference_logprobs(self.merged[name], whole)
            wanted = [table[at, whole[at + 1]] for at in range(len(ids) - 1, len(whole) - 1)]
            given = [entry.logprob for entry in engine.logprobs[n]]
            assert np.allclose(given, wanted, atol=TOLERANCE), name


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Case]]:
    made: dict[str, Case] = {}

    def of(kind: str) -> Case:
        if kind not in made:
            made[kind] = Case(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    yield of


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gemma3", "phi3", "qwen3_moe", "gpt_oss", "mixtral", "qwen3_next"]
)
def test_kinds(case: Callable[[str], Case], kind: str) -> None:
    """Native code and that of transformers, fused matrices, mixtures and states."""
    case(kind).check()


@pytest.mark.parametrize(
    "keys",
    [
        {"kernels": "torch", "page_size": 1},
        {"max_loras": 1, "chunked_prefill_size": 16, "enable_overlap": False},
        {"max_loras": 2, "max_cpu_loras": 2, "page_size": 1, "enable_mixed_chunk": False},
        {"enable_prefix_cache": False, "max_running_requests": 3, "resume": 4},
        {"retract_every": 3, "max_loras": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"quantization": "int8", "activation_quantization": "none"},
    ],
    ids=["torch", "chunks", "turns", "resume", "retraction", "drafts", "int8"],
)
def test_modes(case: Callable[[str], Case], keys: dict[str, Any]) -> None:
    if "quantization" not in keys:
        case("llama").check(**keys)
        return
    # The oracle has other weights; but an adapter must change a quantized model, too.
    mine = case("llama")
    with mine.llm(**keys) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW, ignore_eos=True)
        found = llm.generate(mine.prompts, params, lora=mine.names, use_tqdm=False)
        plain = llm.generate(mine.prompts, params, use_tqdm=False)
    same = [
        sum(a == b for a, b in zip(out.outputs[0].token_ids, want, strict=True))
        for out, want in zip(found, mine.expected, strict=True)
    ]
    assert sum(same) > 0.6 * MAX_NEW * len(same)
    changed = [
        a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(found, plain, strict=True)
    ]
    assert sum(changed) >= 5


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"tp_size": 2}),
        ("qwen3", {"pp_size": 2, "max_loras": 2}),
        ("gemma3", {"tp_size": 2, "page_size": 1}),
        ("qwen3_moe", {"tp_size": 2}),
        ("qwen3_moe", {"tp_size": 2, "ep_size": 2, "max_loras": 2}),
        ("qwen3_moe", {"pp_size": 2, "kernels": "torch"}),
    ],
)
def test_ranks(case: Callable[[str], Case], kind: str, keys: dict[str, Any]) -> None:
    case(kind).check(**keys)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_batch_equals_solo_runs(case: Callable[[str], Case], tmp_path: Path, kind: str) -> None:
    """32 rows over eight adapters and the base, sampled: each as if it were alone."""
    mine = case(kind)
    more = {
        name: str(make_adapter(tmp_path / name, mine.merged[None], rank=3 * seed, seed=seed))
        for seed, name in enumerate("efgh", 5)
    }
    names = [[None, *mine.adapters, *more][n % 9] for n in range(32)]
    prompts = [mine.prompts[n % len(mine.prompts)] for n in range(32)]
    params = [
        SamplingParams(temperature=0.9, seed=n, max_tokens=MAX_NEW, ignore_eos=True)
        for n in range(32)
    ]
    with mine.llm(lora_adapters={**mine.adapters, **more}, max_loras=8) as llm:
        together = llm.generate(prompts, params, lora=names, use_tqdm=False)
        alone = [
            llm.generate([ids], given, lora=name, use_tqdm=False)[0]
            for ids, given, name in zip(prompts, params, names, strict=True)
        ]
    for out, want in zip(together, alone, strict=True):
        assert out.outputs[0].token_ids == want.outputs[0].token_ids


def test_a_folder_is_read_on_demand(case: Callable[[str], Case], tmp_path: Path) -> None:
    """What is replaced there is another adapter, and finds nothing of the old one's prefixes."""
    mine = case("llama")
    at = tmp_path / "one"
    shutil.copytree(mine.adapters["b"], at)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW, ignore_eos=True)
    prompt = mine.prompts[2]
    with LLM(str(mine.model), lora_folder=str(tmp_path), dtype="float32", cpu_threads=1) as llm:
        for name in ("b", "d", "b"):
            shutil.rmtree(at)
            shutil.copytree(mine.adapters[name], at)
            (out,) = llm.generate([prompt], params, lora="one", use_tqdm=False)
            want = greedy_reference(mine.merged[name], [prompt], MAX_NEW)[0]
            assert out.outputs[0].token_ids == want
        with pytest.raises(RequestError, match="no adapter 'two'"):
            llm.generate([prompt], params, lora="two", use_tqdm=False)
        shutil.rmtree(at)
        with pytest.raises(RequestError, match="no adapter 'one'"):
            llm.generate([prompt], params, lora="one", use_tqdm=False)


@pytest.mark.parametrize("fault", ["linear", "shape", "nan"])
def test_an_adapter_of_another_model(
    case: Callable[[str], Case], tmp_path: Path, fault: str
) -> None:
    """Its requests end with a sentence; the engine goes on."""
    from safetensors.torch import load_file, save_file

    mine = case("llama")
    at = tmp_path / "odd"
    shutil.copytree(mine.adapters["a"], at)
    file = at / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    if fault == "linear":
        other = {key.replace("self_attn", "attention"): value for key, value in tensors.items()}
        tensors = other
    elif fault == "shape":
        tensors[name] = torch.zeros((1, tensors[name].shape[1] + 2))
    else:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    says = {"linear": "no linear", "shape": "inputs", "nan": "NaN"}[fault]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(str(mine.model), lora_folder=str(tmp_path), dtype="float32", cpu_threads=1) as llm:
        for _ in range(2):
            with pytest.raises(RequestError, match=says) as caught:
                llm.generate([[5, 6, 7]], params, lora="odd", use_tqdm=False)
            assert caught.value.status == 400
            assert "tiny" in caught.value.message or fault == "nan"
        assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_listed_adapter_of_another_model_keeps_the_engine_from_starting(
    case: Callable[[str], Case],
) -> None:
    mine, other = case("llama"), case("gemma3")
    with pytest.raises(ConfigError, match="doesn't fit"):
        LLM(str(mine.model), lora_adapters={"x": other.adapters["d"]}, cpu_threads=1).shutdown()
