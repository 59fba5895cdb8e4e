"""engine.LLM.embed with the carried model: inputs, outputs, errors, interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.errors import RequestError

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "manta-small")
TEXTS = ["def add(a, b):", "What is a list?", "Bread is made of flour and water."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, max_total_tokens=2048, cpu_threads=1, max_queued_requests=4) as made:
        yield made


def embed(llm: LLM, prompts: Any, **options: Any) -> np.ndarray:
    """[prompts, dimensions]"""
    return np.stack([out.embedding for out in llm.embed(prompts, use_tqdm=False, **options)])


def test_text_and_ids_give_the_same(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (text,) = llm.embed(TEXTS[0], use_tqdm=False)
    ids = llm.tokenizer.encode(TEXTS[0])
    (other,) = llm.embed(ids, use_tqdm=False)
    assert (text.prompt, text.prompt_token_ids) == (TEXTS[0], ids)
    assert (other.prompt, other.prompt_token_ids) == (None, ids)
    assert text.embedding.dtype == np.float32 and text.embedding.shape == (256,)
    assert np.allclose(text.embedding, other.embedding, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_order_and_length(llm: LLM, pooling: str) -> None:
    together = embed(llm, TEXTS, pooling=pooling)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.allclose(embed(llm, text, pooling=pooling)[0], vector, atol=1e-5)
    assert (together @ together.T)[np.triu_indices(3, 1)].max() < 0.999


def test_the_configuration_says_which_pooling() -> None:
    with LLM(MODEL, max_total_tokens=1024, cpu_threads=1, pooling="mean") as llm:
        assert np.array_equal(embed(llm, TEXTS), embed(llm, TEXTS, pooling="mean"))
        assert not np.allclose(embed(llm, TEXTS), embed(llm, TEXTS, pooling="last"), atol=0.1)


def test_dimensions_and_normalize(llm: LLM) -> None:
    raw = embed(llm, TEXTS, normalize=False)
    short = embed(llm, TEXTS, normalize=False, dimensions=10)
    assert np.allclose(short, raw[:, :10], atol=1e-4)
    unit = embed(llm, TEXTS, dimensions=10)
    assert np.allclose(unit, short / np.linalg.norm(short, axis=1, keepdims=True), atol=1e-5)


def test_repeated_prompt_hits_the_cache_only_for_the_last_state(llm: LLM) -> None:
    prompt = [7 + i % 500 for i in range(100)]
    (first,) = llm.embed(prompt, use_tqdm=False)
    (again,) = llm.embed(prompt, use_tqdm=False)
    (mean,) = llm.embed(prompt, pooling="mean", use_tqdm=False)
    assert (again.num_cached_tokens, mean.num_cached_tokens) == (96, 0)
    assert np.allclose(first.embedding, again.embedding, atol=1e-5)


def test_more_prompts_than_may_wait(llm: LLM) -> None:
    prompts = [[10 + i, 20] for i in range(50)]
    assert embed(llm, prompts).shape == (50, 256)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    assert all(len(o.outputs[0].token_ids) == 2 for o in llm.generate(prompts, params))


def test_no_prompts(llm: LLM) -> None:
    assert llm.embed([], use_tqdm=False) == []


def test_a_prompt_may_take_the_whole_context(llm: LLM) -> None:
    ids = [5 + i % 300 for i in range(llm.max_model_len)]
    assert embed(llm, [ids], pooling="mean").shape == (1, 256)
    with pytest.raises(RequestError, match="context length") as caught:
        llm.embed([*ids, 5])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([4096], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ("x", {"pooling": "cls"}, "pooling"),
        ("x", {"dimensions": 0}, "dimensions"),
        ("x", {"dimensions": 257}, "dimensions"),
    ],
)
def test_bad_input_is_refused_by_name(
    llm: LLM, prompt: str | list[int], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.embed([prompt], use_tqdm=False, **options)
    assert caught.value.param == param
    assert llm.core.scheduler.is_idle


def test_interrupted_run_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = llm.core.step, 0

    def interrupted() -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.embed([[5 + i % 300 for i in range(1500)]] * 9, pooling="mean", use_tqdm=False)
    monkeypatch.undo()
    assert llm.core.scheduler.is_idle
    assert llm.core.scheduler.check_invariants() is None
    assert embed(llm, TEXTS).shape == (3, 256)
