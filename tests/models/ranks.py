"""`Ranks`: two processes that play one model after the other, divided among them."""

from __future__ import annotations

import functools
import itertools
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers
from torch import Tensor

from engine.config import EngineConfig
from engine.device.distributed import init_parallel
from engine.errors import ConfigError
from engine.models import recording
from tests.support.step_driver import StepDriver, make_runner, run_lines

# Far above what any model takes: nothing here may end because of it.
_TIMEOUT_S = 600.0
_POLL_S = 0.5


class Ranks:
    """Started when they are first needed, and again after a failure."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        self._numbers = itertools.count()

    def play(
        self, folder: Path, tp_size: int, pp_size: int, lines: list[list[int]], num_decoded: int
    ) -> list[list[Tensor]]:
        """Of each rank of the last stage: the logits [tokens, vocab] of each line, as `run_lines`
        gives them. Raises the first rank's `ConfigError`, or its error as a `RuntimeError`;
        `EOFError` if its process ended."""
        if not self._processes:
            self._start()
        meeting = folder / f"meeting.{next(self._numbers)}"
        task = (str(folder), f"file://{meeting}", tp_size, pp_size, lines, num_decoded)
        found: dict[int, Any] = {}
        try:
            for end in self._ends:
                end.send(task)
            while len(found) < len(self._ends):
                for rank, end in enumerate(self._ends):
                    if rank not in found and end.poll(_POLL_S):
                        found[rank] = end.recv()
                        if isinstance(found[rank], Exception):
                            raise found[rank]
        except BaseException:
            self.stop()  # the other may wait for it
            raise
        last = [[torch.from_numpy(x) for x in found[rank]] for rank in found if found[rank]]
        assert len(last) == tp_size
        return last

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(mine)


def _serve(rank: int, end: Connection) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        # In this process: another would load torch for each type.
        record = functools.cache(recording.record)
        patch.setattr("engine.checkpoint.model_config.read_layout", record)
        while True:
            try:
                task = end.recv()
            except EOFError:
                return
            try:
                end.send(_play(rank, *task))
            except ConfigError as error:
                end.send(error)
            except Exception as error:  # raised again where it was asked for
                end.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))


def _play(
    rank: int,
    folder: str,
    meeting: str,
    tp_size: int,
    pp_size: int,
    lines: list[list[int]],
    num_decoded: int,
) -> list[Any]:
    parallel = init_parallel("gloo", meeting, rank, tp_size, pp_size, _TIMEOUT_S)
    kernels = EngineConfig().kernel_choice("cpu")
    runner = make_runner(folder, page_size=4, parallel=parallel, kernels=kernels)
    found = run_lines(StepDriver(runner), lines, num_decoded)
    torch.distributed.barrier()
    parallel.destroy()
    return [rows.numpy() for rows in found]
