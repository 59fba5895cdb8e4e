"""How many compute threads a worker has on CPU, and how many of them a step gets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.worker.auto_config import (
    SHORT_STEP_S,
    SHORT_TORCH_STEP_S,
    auto_threads,
    make_worker_config,
    short_step_s,
)
from engine.worker.step_threads import StepThreads
from tests.support.models import make_config, make_model
from tests.support.step_driver import StepDriver, make_runner


@pytest.mark.parametrize(
    ("cores", "workers", "serving", "threads"),
    [
        (1, 1, True, 1),
        (2, 1, True, 2),
        (2, 2, True, 1),
        (2, 4, True, 1),
        (3, 1, True, 2),
        (8, 1, True, 7),
        (8, 2, True, 3),
        (8, 1, False, 8),
        (8, 2, False, 4),
    ],
)
def test_cores_are_divided(cores: int, workers: int, serving: bool, threads: int) -> None:
    assert auto_threads(cores, workers, serving=serving) == threads


def test_steps_are_short_only_where_no_core_is_left() -> None:
    assert short_step_s(2, 2, "cpu", serving=True) == SHORT_STEP_S
    assert short_step_s(3, 2, "torch", serving=True) == SHORT_STEP_S
    assert short_step_s(7, 8, "cpu", serving=True) == 0.0
    assert short_step_s(2, 2, "cpu", serving=False) == 0.0
    assert short_step_s(8, 8, "torch", serving=False) == SHORT_TORCH_STEP_S


def test_a_server_divides_its_cores(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from engine.config import EngineConfig

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    resolved = EngineConfig(model=str(folder), max_total_tokens=1024).resolve()
    in_process, server = make_worker_config(resolved), make_worker_config(resolved, serving=True)
    assert (in_process.cpu_threads, server.cpu_threads) == (6, 5)
    assert server.short_step_s == 0.0
    of_three = make_worker_config(resolved, serving=True, share=3)
    assert (of_three.cpu_threads, of_three.short_step_s) == (1, 0.0)
    stated = EngineConfig(model=str(folder), max_total_tokens=1024, cpu_threads=6).resolve()
    assert make_worker_config(stated, serving=True).short_step_s == SHORT_STEP_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


def test_short_steps_run_on_one_thread(folder: Path) -> None:
    """In the thread that runs the steps, and with the same result."""
    runner = make_runner(str(folder))
    driver = StepDriver(runner)
    req = driver.add(list(range(3, 60)))
    prefill = runner.prepare(driver.build([(req, 57)], []))
    req.tokens.append(7)
    decode = runner.prepare(driver.build([], [req]))
    config = make_config(folder)
    of_one = StepThreads(config, runner.parallel, runner.kv_bytes_per_token)
    between = (of_one.estimate_s(1, 58) + of_one.estimate_s(57, 57)) / 2
    assert of_one.estimate_s(1, 58) < between < of_one.estimate_s(57, 57)
    config = make_config(folder, cpu_threads=3, short_step_s=between)

    def count() -> list[int]:
        torch.set_num_threads(3)
        threads = StepThreads(config, runner.parallel, runner.kv_bytes_per_token)
        found = []
        for batch in (prefill, decode, decode, prefill):
            threads.choose(batch)
            found.append(torch.get_num_threads())
        return found

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(count).result() == [3, 1, 1, 3]


def test_the_estimate_grows_with_all_that_a_step_reads_or_multiplies(folder: Path) -> None:
    runner = make_runner(str(folder))
    steps = StepThreads(make_config(folder), runner.parallel, runner.kv_bytes_per_token)
    assert steps.estimate_s(2, 10) == steps.estimate_s(1, 10)  # the weights are read once
    assert steps.estimate_s(64, 10) == pytest.approx(2 * steps.estimate_s(32, 10))
    more = steps.estimate_s(1, 1_010) - steps.estimate_s(1, 10)
    assert more == pytest.approx(1_000 * runner.kv_bytes_per_token / 20e9)


def test_rounded_weights_are_read_faster_and_multiplied_as_plain_ones(folder: Path) -> None:
    runner = make_runner(str(folder))

    def estimate(quantization: str, tokens: int) -> float:
        config = make_config(folder, quantization=quantization)
        steps = StepThreads(config, runner.parallel, runner.kv_bytes_per_token)
        return steps.estimate_s(tokens, 0)

    assert estimate("int4", 1) < estimate("int8", 1) < estimate("auto", 1)
    assert estimate("int4", 64) == estimate("int8", 64) == estimate("auto", 64)
