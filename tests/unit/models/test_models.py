"""Every architecture against transformers, in float32: prefill, chunks, prefixes, decode, mixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.worker.model_runner import ModelRunner
from tests.support.kernels import load_kernels
from tests.support.models import LLAMA3_ROPE, make_model
from tests.support.step_driver import DrivenReq, StepDriver, make_runner

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3-rope-tied-bias": (
        "LlamaForCausalLM",
        {
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 8}),
    "mistral-full": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-some-windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3-head-dim": ("Qwen3ForCausalLM", {"head_dim": 24}),
}
ATOL = 1e-4


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, overrides = CASES[request.param]
    return make_model(tmp_path_factory.mktemp("model"), arch, **overrides)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.fixture(
    scope="module", params=[("torch", 1), ("torch", 16), ("cpu", 1), ("cpu", 16)], ids=str
)
def runner(folder: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    backend, page_size = request.param
    if backend == "cpu":
        load_kernels()
    yield make_runner(str(folder), attention_backend=backend, page_size=page_size)


def expected(oracle: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([tokens])).logits[0]
    return logits


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 211, (length,), generator=generator).tolist()


def close(actual: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, wanted, atol=ATOL, rtol=ATOL)


def test_prefill_gives_the_logits_of_every_token(runner: ModelRunner, oracle: Any) -> None:
    driver = StepDriver(runner)
    reqs = [driver.add(prompt(length, length)) for length in (1, 5, 37)]
    logits, rows = driver.run([(req, len(req.tokens)) for req in reqs], [], prompt_logits=True)
    assert logits is not None and logits.dtype == torch.float32
    for index, req in enumerate(reqs):
        wanted = expected(oracle, req.tokens)
        close(rows[index], wanted)
        close(logits[index], wanted[-1])


class Recorder:
    """Appends greedy tokens to requests and keeps the logits that they were chosen from."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[DrivenReq, list[tuple[int, torch.Tensor]]]] = {}

    def sample(self, logits: torch.Tensor | None, reqs: list[DrivenReq]) -> None:
        assert logits is not None
        for row, req in enumerate(reqs):
            if req.done == len(req.tokens):
                kept = self.seen.setdefault(id(req), (req, []))[1]
                kept.append((req.done - 1, logits[row]))
                req.tokens.append(int(logits[row].argmax()))

    def check(self, oracle: Any) -> None:
        for req, kept in self.seen.values():
            wanted = expected(oracle, req.tokens)
            for position, logits in kept:
                close(logits, wanted[position])


def test_chunks_and_greedy_decode_in_mixed_batches(runner: ModelRunner, oracle: Any) -> None:
    """One request decodes while the next is prefilled in chunks, as continuous batching does."""
    driver = StepDriver(runner, seed=1)
    first, second, third = (driver.add(prompt(n, n)) for n in (19, 41, 3))
    recorder = Recorder()
    recorder.sample(driver.run([(first, 19)], [])[0], [first])
    for chunk in (16, 9, 16):
        recorder.sample(driver.run([(second, chunk)], [first])[0], [second, first])
    recorder.sample(driver.run([(third, 3)], [first, second])[0], [third, first, second])
    for order in ([first, second, third], [third, first, second], [second, third]):
        for _ in range(3):
            recorder.sample(driver.run([], order)[0], order)
    driver.remove(first)
    # The freed row and pages serve another request while the others go on.
    fourth = driver.add(prompt(11, 5))
    recorder.sample(driver.run([(fourth, 11)], [second, third])[0], [fourth, second, third])
    for _ in range(4):
        recorder.sample(driver.run([], [fourth, third, second])[0], [fourth, third, second])
    recorder.check(oracle)
    assert len(second.tokens) == 41 + 16
    assert len(set(second.tokens[41:])) > 4, "the model repeats itself: too weak a test"


def test_shared_prefix(runner: ModelRunner, oracle: Any) -> None:
    driver = StepDriver(runner, seed=2)
    head = prompt(32, 9)
    first = driver.add(head + prompt(7, 1))
    driver.run([(first, 39)], [])
    second = driver.add(head + prompt(13, 2))
    driver.share_prefix(second, first, 32)
    logits, rows = driver.run([(second, 13)], [], prompt_logits=True)
    wanted = expected(oracle, second.tokens)
    close(rows[0], wanted[32:])
    assert logits is not None
    second.tokens.append(int(logits[0].argmax()))
    logits, _ = driver.run([], [second])
    close(logits, expected(oracle, second.tokens)[-1:])


def test_same_tokens_in_any_micro_batch(runner: ModelRunner, oracle: Any) -> None:
    """Requests that move between micro-batches and sit out steps keep their context."""
    driver = StepDriver(runner, seed=3)
    reqs = [driver.add(prompt(n, n)) for n in (9, 10, 30)]
    driver.run([(req, len(req.tokens)) for req in reqs], [])
    recorder = Recorder()
    for req in reqs:
        req.tokens.append(7)
    plan = [([0, 1, 2], 0), ([0, 1], 1), ([2], 0), ([1, 2], 0), ([0], 1), ([2, 0, 1], 1)]
    for members, micro_batch in plan * 2:
        rows = [reqs[i] for i in members]
        recorder.sample(driver.run([], rows, micro_batch=micro_batch)[0], rows)
    recorder.check(oracle)


def test_tokens_that_are_not_sampled_change_nothing(folder: Path) -> None:
    """The last layer leaves them out, unless their logits are asked for: the same to the last bit.

    Chunks that sample nothing are followed by one that reads what they stored.
    """
    load_kernels()
    found: list[list[torch.Tensor]] = []
    for prompt_logits in (False, True):
        driver = StepDriver(make_runner(str(folder), attention_backend="cpu", page_size=16))
        first, second, third = (driver.add(prompt(n, n)) for n in (37, 64, 21))
        first.tokens += [7, 8]
        third.tokens += [9]
        steps = (
            ([(first, 37)], [], [0]),
            ([(second, 16)], [], []),
            ([(second, 16), (third, 21)], [first], [1, 2]),
            ([(second, 32)], [first, third], [0, 2]),
        )
        found.append([])
        for extends, decodes, sampled in steps:
            logits, _ = driver.run(extends, decodes, sampled=sampled, prompt_logits=prompt_logits)
            assert logits is not None and len(logits) == len(sampled)
            found[-1].append(logits)
    for alone, among_all in zip(*found, strict=True):
        assert torch.equal(alone, among_all)


def test_earlier_stages_get_the_remaining_layers() -> None:
    model = EngineConfig().resolve().model
    stages = replace(model, num_layers=7).stage_layers(3)
    assert stages == [range(0, 3), range(3, 5), range(5, 7)]
    with pytest.raises(ConfigError, match=r"pp_size \(4\) exceeds"):
        replace(model, num_layers=3).check_split(1, 4)
