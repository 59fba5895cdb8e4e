"""`ThreadExecutor`: order, failures, timeouts, the end of its thread; `engine.LLM` with it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import WorkerConfig
from engine.errors import ConfigError, EngineDeadError
from engine.executor import worker_thread
from engine.executor.worker_thread import ThreadExecutor
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.scheduler.scheduler import Scheduler
from engine.worker.base import LaunchedForward, ModelWorker, PendingResult
from engine.worker.model_runner import ModelRunner
from engine.worker.simulated import SimulatedWorker
from tests.support.steps import decode_step, no_masks

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "models" / "manta-small")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
PATIENCE_S = 20.0


def step(number: int, *, delayed: bool = False) -> ModelWorkerBatch:
    return decode_step(number, (1,), delayed=delayed)


class GatedWorker(ModelWorker):
    """Runs a step only once the test lets it, and fails at step `fails_at`."""

    def __init__(self) -> None:
        self.num_kv_tokens = 64
        self.gate = threading.Semaphore(0)
        self.started: list[int] = []
        self.threads = {threading.current_thread()}
        self.fails_at = -1

    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward:
        self.threads.add(threading.current_thread())
        self.started.append(batch.step)
        assert self.gate.acquire(timeout=PATIENCE_S)
        if batch.step == self.fails_at:
            raise ValueError(f"no step {batch.step}")
        return GatedForward(batch, self)


@dataclass
class GatedForward(LaunchedForward):
    worker: GatedWorker

    def sample(self, masks: SampleMasks | None) -> PendingResult:
        self.worker.threads.add(threading.current_thread())
        return GatedResult(self.batch.step)


@dataclass
class GatedResult(PendingResult):
    step: int

    def seconds_left(self) -> float:
        return 0.0

    def collect(self) -> GenerationBatchResult:
        return GenerationBatchResult(self.step, [7])


@dataclass
class Setup:
    """An executor whose worker is gated."""

    executor: ThreadExecutor
    made: list[GatedWorker] = field(default_factory=list)

    @property
    def worker(self) -> GatedWorker:
        return self.made[-1]

    def open(self, steps: int = 1000) -> None:
        self.worker.gate.release(steps)

    def wait(self) -> int:
        result = self.executor.wait(PATIENCE_S)
        assert result is not None
        return result.step


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    made: list[GatedWorker] = []

    def make(*args: object) -> ModelWorker:
        made.append(GatedWorker())
        return made[-1]

    monkeypatch.setattr(worker_thread, "make_worker", make)
    found = Setup(ThreadExecutor(cast(WorkerConfig, None)), made)
    yield found
    found.open()
    found.executor.shutdown()
    assert not worker_threads()


def worker_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "manta-worker"]


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_launch_returns_before_the_step_has_run_and_results_keep_their_order(setup: Setup) -> None:
    assert setup.executor.num_kv_tokens == 64
    for number in (1, 2, 3):
        setup.executor.launch(step(number))
    until(lambda: setup.worker.started == [1])  # and none behind it
    setup.open()
    assert [setup.wait() for _ in range(3)] == [1, 2, 3]


def test_only_its_thread_touches_the_worker(setup: Setup) -> None:
    setup.open()
    setup.executor.launch(step(1))
    setup.executor.launch(step(2, delayed=True))
    setup.executor.sample(no_masks(2))
    assert [setup.wait(), setup.wait()] == [1, 2]
    assert setup.worker.threads == set(worker_threads())


def test_a_delayed_step_waits_for_its_masks(setup: Setup) -> None:
    setup.open()
    setup.executor.launch(step(1, delayed=True))
    assert setup.executor.wait(0.05) is None
    setup.executor.sample(no_masks(1))
    assert setup.wait() == 1


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.1])
def test_wait_ends_at_its_timeout(setup: Setup, timeout_s: float) -> None:
    setup.executor.launch(step(1))
    started = time.monotonic()
    assert setup.executor.wait(timeout_s) is None
    assert max(timeout_s, 0.0) <= time.monotonic() - started < PATIENCE_S
    setup.open()
    assert setup.wait() == 1


def test_without_a_step_in_flight_wait_returns_at_once(setup: Setup) -> None:
    assert setup.executor.wait(None) is None


def test_a_failing_step(setup: Setup) -> None:
    setup.worker.fails_at = 2
    setup.open()
    for number in (1, 2, 3):
        setup.executor.launch(step(number))
    assert setup.wait() == 1
    with pytest.raises(ValueError, match="no step 2") as raised:
        setup.executor.wait(None)
    assert "in forward" in "".join(traceback.format_exception(raised.value))
    for again in (
        lambda: setup.executor.wait(0.0),
        lambda: setup.executor.launch(step(4)),
        lambda: setup.executor.sample(no_masks(2)),
    ):
        with pytest.raises(
            EngineDeadError, match="the worker failed: ValueError: no step 2"
        ) as caught:
            again()
        assert caught.value.__cause__ is raised.value
    assert setup.worker.started == [1, 2]


@pytest.mark.parametrize("error", [ConfigError("too large"), MemoryError(), SystemExit(3)])
def test_an_error_while_the_worker_is_made(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object) -> ModelWorker:
        raise error

    monkeypatch.setattr(worker_thread, "make_worker", fail)
    with pytest.raises(type(error)) as caught:
        ThreadExecutor(cast(WorkerConfig, None))
    assert caught.value is error
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    assert not worker_threads()


def test_shutdown_skips_the_steps_that_have_not_begun(setup: Setup) -> None:
    for number in (1, 2, 3):
        setup.executor.launch(step(number))
    until(lambda: setup.worker.started == [1])
    threading.Timer(0.1, setup.open).start()
    setup.executor.shutdown()
    assert setup.worker.started == [1]
    assert not worker_threads()
    setup.executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        setup.executor.launch(step(4))


def test_shutdown_leaves_a_step_that_does_not_end(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_thread, "STOP_TIMEOUT_S", 0.1)
    setup.executor.launch(step(1))
    setup.executor.launch(step(2))
    until(lambda: setup.worker.started == [1])
    setup.executor.shutdown()
    assert len(worker_threads()) == 1
    setup.open()
    until(lambda: not worker_threads())
    assert setup.worker.started == [1]


def test_the_thread_ends_with_an_executor_that_is_dropped(setup: Setup) -> None:
    dropped = ThreadExecutor(cast(WorkerConfig, None))
    assert len(worker_threads()) == 2
    del dropped
    gc.collect()
    until(lambda: len(worker_threads()) == 1)


# With the carried model


def test_two_llms_in_one_process_and_no_thread_afterwards() -> None:
    keys: dict[str, Any] = dict(max_total_tokens=1024, cpu_threads=1)
    before = torch.get_num_threads()
    with LLM(MODEL, **keys) as first, LLM(MODEL, **keys) as second:
        assert isinstance(first.core.executor, ThreadExecutor)
        assert len(worker_threads()) == 2
        results = [
            llm.generate(["def ", "import"], GREEDY, use_tqdm=False)
            for llm in (first, second, first)
        ]
        names = {e["args"]["name"] for e in first.trace()["traceEvents"] if e["ph"] == "M"}
    tokens = [[out.outputs[0].token_ids for out in result] for result in results]
    assert tokens[0] == tokens[1] == tokens[2]
    assert {"scheduler", "stage 0, tensor rank 0"} <= names
    assert not worker_threads()
    assert torch.get_num_threads() == before  # of the caller's thread


def test_the_simulated_device_needs_no_thread() -> None:
    with LLM(MODEL, max_total_tokens=1024, device="simulated") as llm:
        worker = getattr(llm.core.executor, "worker", None)
        assert isinstance(worker, SimulatedWorker)
        assert not worker_threads()


def test_llm_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(MODEL, max_total_tokens=1024, cpu_threads=1) as llm:

        def fail(self: object, *args: object) -> None:
            raise RuntimeError("no memory left")

        monkeypatch.setattr(ModelRunner, "forward", fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="RuntimeError: no memory left"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert not worker_threads()


def test_ctrl_c_ends_the_run_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: while the main thread waits, composes a step or commits one."""
    with LLM(MODEL, max_total_tokens=1024, cpu_threads=1) as llm:
        expected = llm.generate("def ", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for owner, name in (
            (ModelRunner, "forward"),
            (Scheduler, "next_batch"),
            (Scheduler, "process_result"),
            (ThreadExecutor, "launch"),
        ):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                calls = interrupt(patch, owner, name)
                llm.generate(["a", "b"], ENDLESS, use_tqdm=False)
            assert 3 <= len(calls) <= 5
            assert llm.core.scheduler.is_idle
            assert llm.core.scheduler.check_invariants() is None
            again = llm.generate("def ", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            assert again == expected


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Press Ctrl-C in the third call of a method, before and after which others have time to run.
    Returns a list that gets an entry per call."""
    method, calls = getattr(owner, name), []

    def interrupting(*args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 3:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return method(*args)

    patch.setattr(owner, name, interrupting)
    return calls


def test_a_lost_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with LLM(MODEL, max_total_tokens=1024, cpu_threads=1) as llm:
        monkeypatch.setattr(llm.core.executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
        monkeypatch.undo()
        with pytest.raises(EngineDeadError, match="make a new LLM"):
            llm.generate("a", GREEDY, use_tqdm=False)


def test_a_process_ends_with_steps_in_flight() -> None:
    code = f"""
import numpy as np
from engine import LLM, SamplingParams
from engine.protocol.messages import AddRequest
from engine.protocol.sequence import TokenSequence
llm = LLM({MODEL!r}, max_total_tokens=4096, cpu_threads=1)
params = SamplingParams(max_tokens=50, seed=1)
for rid in range(32):
    sequence = TokenSequence(np.full(90, rid + 5, np.int32), params)
    request = AddRequest(rid=rid, sequence=sequence)
    llm.core.scheduler.add(request, 0.0)
assert llm.core.launch_ready() == 2
print("leaves")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")
