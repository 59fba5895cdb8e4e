"""`ThreadExecutor`: the worker in a thread of this process, for `engine.LLM` on CPU.

On CPU the thread that launches a step computes it. In a thread of the worker's own, the scheduler
goes on meanwhile, as it does beside a worker process.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref

from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.errors import EngineDeadError
from engine.executor.base import Executor
from engine.protocol.adapters import AdapterLoaded, DropAdapter, LoadAdapter
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.trace import StageSpan, TraceRing
from engine.worker.base import ModelWorker, apply_order
from engine.worker.factory import make_worker
from engine.worker.step_queue import StepQueue

_Message = ModelWorkerBatch | SampleMasks | LoadAdapter | DropAdapter
STOP_TIMEOUT_S = 10.0
"""How long a stop waits for the step that runs. The thread ends after it in any case."""


class ThreadExecutor(Executor):
    """One worker (tp_size = pp_size = 1) in a daemon thread, which makes and uses it alone.

    torch keeps the number of threads, their pool and inference mode per calling thread. What the
    worker raises is raised again, by the constructor or by `wait`, with its traceback. Later calls
    raise `EngineDeadError`.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.trace: TraceRing[StageSpan] = TraceRing()
        self._thread = _WorkerThread(config, self.trace)
        self._in_flight = 0
        self._failure: BaseException | None = None
        self._is_shut_down = False
        # The thread doesn't hold this object: one that is dropped without shutdown is collected.
        weakref.finalize(self, self._thread.ask_to_stop).atexit = False
        _threads.add(self._thread)
        self._thread.start()
        try:
            ready = self._thread.results.get()
        except BaseException:  # Ctrl-C
            self._thread.ask_to_stop()
            raise
        if isinstance(ready, BaseException):
            self._thread.stop()
            raise ready
        assert isinstance(ready, int)
        self.num_kv_tokens = ready

    def launch(self, batch: ModelWorkerBatch) -> None:
        self._check()
        self._thread.messages.put(batch)
        self._in_flight += 1

    def sample(self, masks: SampleMasks) -> None:
        self._check()
        self._thread.messages.put(masks)

    def order(self, message: LoadAdapter | DropAdapter) -> None:
        self._check()
        self._thread.messages.put(message)

    def take_loaded(self) -> list[AdapterLoaded]:
        return self._thread.take_loaded()

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        """As in `Executor`. With no step in flight it returns None at once."""
        self._check()
        if not self._in_flight:
            return None
        try:
            timeout = None if timeout_s is None else max(timeout_s, 0.0)
            result = self._thread.results.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            self._failure = result
            raise result
        assert isinstance(result, GenerationBatchResult)
        self._in_flight -= 1
        return result

    def expert_tokens(self) -> dict[int, list[int]]:
        """As they are between steps: with a step in flight, some layers may be ahead."""
        worker = self._thread.worker
        return {} if worker is None else worker.expert_tokens()

    def shutdown(self) -> None:
        """Stop the worker after the step that runs, if one does. It may be called again."""
        self._thread.stop()
        self._is_shut_down = True

    def _check(self) -> None:
        if (error := self._failure) is not None:
            raise EngineDeadError(f"the worker failed: {type(error).__name__}: {error}") from error
        if self._is_shut_down:
            raise EngineDeadError("the worker was shut down")


class _WorkerThread(threading.Thread):
    """Makes the worker, then runs the steps of `messages` in order."""

    def __init__(self, config: WorkerConfig, trace: TraceRing[StageSpan]) -> None:
        super().__init__(name="manta-worker", daemon=True)
        self.messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        """None wakes the thread to see that it shall stop."""
        self.results: queue.SimpleQueue[int | GenerationBatchResult | BaseException] = (
            queue.SimpleQueue()
        )
        """`num_kv_tokens` once the worker is ready, then results. An error is the last entry."""
        self._config = config
        self._trace = trace
        self._stopping = False
        self.worker: ModelWorker | None = None
        """Set when it is ready."""

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # whatever it is, somebody waits
            self.results.put(error)

    def _run(self) -> None:
        worker = make_worker(self._config, ParallelState.single(), self._trace)
        self.worker, steps = worker, StepQueue(worker)
        self.results.put(worker.num_kv_tokens)
        while (message := self.messages.get()) is not None and not self._stopping:
            match message:
                case ModelWorkerBatch():
                    steps.launch(message)
                case SampleMasks():
                    steps.apply(message)
                case _:
                    apply_order(worker, message)
            for result in steps.take_ready():
                self.results.put(result)

    def take_loaded(self) -> list[AdapterLoaded]:
        """Any thread may ask."""
        return [] if self.worker is None else self.worker.take_loaded()

    def ask_to_stop(self) -> None:
        """Let the thread end after the step that runs. Takes no lock: a collector may call it."""
        self._stopping = True
        self.messages.put(None)

    def stop(self) -> None:
        """End the thread, and wait for it at most `STOP_TIMEOUT_S`."""
        self.ask_to_stop()
        self.join(STOP_TIMEOUT_S)


_threads: weakref.WeakSet[_WorkerThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop before the interpreter does: to end a thread within a torch operator would abort."""
    for thread in list(_threads):
        with contextlib.suppress(RuntimeError):  # not started yet
            thread.stop()
