"""engine.LLM with the carried model: inputs, outputs, errors, interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.constraints.grammar_payload import Thinking
from engine.errors import ConfigError, RequestError

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "manta-small")
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, max_total_tokens=2048, cpu_threads=1) as made:
        yield made


def test_text_and_ids_give_the_same(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (text,) = llm.generate("def ", GREEDY, use_tqdm=False)
    (ids,) = llm.generate(llm.tokenizer.encode("def "), GREEDY, use_tqdm=False)
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    assert text.outputs[0].text == llm.tokenizer.decode(text.outputs[0].token_ids)
    assert text.outputs[0].finish_reason in ("length", "stop")


def test_order_and_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 9, 1)]
    outs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [o.prompt for o in outs] == ["a", "b", "c"]
    assert [len(o.outputs[0].token_ids) for o in outs] == [3, 9, 1]


def test_repeated_prompt_hits_the_cache(llm: LLM) -> None:
    prompt = [7 + i % 500 for i in range(100)]
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 96


def test_unseeded_sampling_varies_and_seeded_repeats(llm: LLM) -> None:
    free = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
    fixed = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True, seed=1)
    outs = llm.generate(["x"] * 4, free, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outs}) > 1
    outs = llm.generate(["x"] * 4, fixed, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outs}) == 1


def test_stop_string(llm: LLM) -> None:
    (plain,) = llm.generate("def ", SamplingParams(max_tokens=40, temperature=0), use_tqdm=False)
    stop = plain.outputs[0].text[10:13]
    params = SamplingParams(max_tokens=40, temperature=0, stop=[stop])
    (out,) = llm.generate("def ", params, use_tqdm=False)
    assert out.outputs[0].finish_reason == "stop"
    assert out.outputs[0].stop_reason == stop
    assert out.outputs[0].text == plain.outputs[0].text[: plain.outputs[0].text.index(stop)]


def test_n_sequences(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=2**63 - 2, ignore_eos=True)
    (many,) = llm.generate("x", params, use_tqdm=False)
    assert [o.index for o in many.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in many.outputs}) == 3
    second = SamplingParams(max_tokens=8, temperature=1.0, seed=2**63 - 1, ignore_eos=True)
    (alone,) = llm.generate("x", second, use_tqdm=False)
    assert alone.outputs[0].token_ids == many.outputs[1].token_ids


def test_stop_may_be_one_string() -> None:
    assert SamplingParams(stop="ab").stop == ["ab"]  # type: ignore[arg-type]


def test_chat(llm: LLM) -> None:
    (out,) = llm.chat([{"role": "user", "content": "What is a list?"}], GREEDY, use_tqdm=False)
    assert out.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], GREEDY, "prompt"),
        ([4096], GREEDY, "prompt"),
        ([2**40], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([5] * 5000, GREEDY, "prompt"),
        ("x", SamplingParams(temperature=float("inf")), "temperature"),
        ("x", SamplingParams(min_tokens=5, max_tokens=2), "min_tokens"),
    ],
)
def test_bad_input_is_refused_by_name(
    llm: LLM, prompt: str | list[int], params: SamplingParams, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([prompt], params, use_tqdm=False)
    assert caught.value.param == param
    assert llm.core.scheduler.is_idle
    assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_interrupted_run_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = llm.core.step, 0

    def interrupted() -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50, temperature=0), use_tqdm=False)
    monkeypatch.undo()
    assert llm.core.scheduler.is_idle
    assert llm.core.scheduler.check_invariants() is None


def test_config_errors_come_before_the_weights() -> None:
    with pytest.raises(ConfigError, match="did you mean 'page_size'"):
        LLM(MODEL, page_sise=1)
    with pytest.raises(ConfigError, match="does not exist"):
        LLM("models/none")
    with pytest.raises(ConfigError, match="can't hold one request"):
        LLM(MODEL, max_total_tokens=64, max_model_len=128)


def test_stops_count_behind_the_thought(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.generate("def ", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    thought = llm.tokenizer.decode(ids[:4])
    stop = next(token for token in ids[4:] if not llm.tokenizer.token_text(token).isspace())
    text = llm.tokenizer.token_text(stop)

    def run(end: str, **stops: object) -> tuple[int, object]:
        thinking = Thinking("<think>", end, is_open=True)
        params = msgspec.structs.replace(GREEDY, thinking=thinking, **stops)
        output = llm.generate("def ", params, use_tqdm=False)[0].outputs[0]
        return len(output.token_ids), output.stop_reason

    assert run("never", stop_token_ids=[stop]) == run("never", stop=[text]) == (len(ids), None)
    behind = 4 + ids[4:].index(stop) + 1
    assert run(thought, stop_token_ids=[stop]) == (behind, stop)
    assert run(thought, stop=[text]) == (behind, text)


def test_a_thought_needs_a_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "tokenizer", None)
    params = SamplingParams(max_tokens=2, thinking=Thinking("<think>", "</think>", is_open=True))
    with pytest.raises(RequestError, match="tokenizer") as caught:
        llm.generate([1, 2], params, use_tqdm=False)
    assert caught.value.param == "thinking"


@pytest.mark.parametrize(
    "make",
    [
        np.array,
        torch.tensor,
        tuple,
        lambda ids: np.array(ids, np.uint16),
        lambda ids: [np.int32(token) for token in ids],
        lambda ids: list(torch.tensor(ids)),
        lambda ids: [np.array(ids)],
        lambda ids: [torch.tensor(ids)],
        lambda ids: np.array([ids]),
        lambda ids: torch.tensor([ids]),
        lambda ids: (np.array(ids),),
    ],
)
def test_arrays_and_tensors_are_token_ids(llm: LLM, make: Callable[[list[int]], Any]) -> None:
    ids = [7, 300, 12, 45]
    (plain,) = llm.generate(ids, GREEDY, use_tqdm=False)
    (got,) = llm.generate(make(ids), GREEDY, use_tqdm=False)
    assert got.prompt_token_ids == ids and type(got.prompt_token_ids[0]) is int
    assert got.outputs[0].token_ids == plain.outputs[0].token_ids
    (vector,) = llm.embed(make(ids), use_tqdm=False)
    assert vector.prompt_token_ids == ids


def test_several_arrays_and_texts(llm: LLM) -> None:
    prompts: Any = ["def ", np.array([7, 8]), torch.tensor([9]), [3, 4]]
    outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [out.prompt_token_ids for out in outs][1:] == [[7, 8], [9], [3, 4]]


@pytest.mark.parametrize("prompt", [np.array([1.5]), [[1.0, 2.0]], 7, [None], [True], [{"a": 1}]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is a text or"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
