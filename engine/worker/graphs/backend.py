"""Recording work once and launching it again as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class GraphBackend(ABC):
    """Makes graphs that are replayed one at a time, on the stream that they were captured on.

    Graphs share their temporary memory, so its content may be lost from one replay to the next.
    Results go to memory that was allocated before the capture.
    """

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run`, then record another call of it. A call of the result repeats the recording.

        A repetition works on the same memory and runs no Python of `run`.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of device memory that nobody has taken."""


class CudaGraphBackend(GraphBackend):
    """CUDA graphs (`torch.cuda.CUDAGraph`) over one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # Work that is done only the first time (cuBLAS handles, autotuning) can't be recorded.
        run()
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free
