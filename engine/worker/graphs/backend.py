"""Recording work once and launching it again as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class GraphBackend(ABC):
    """Makes graphs that are replayed one at a time, on the stream that they were captured on.

    Graphs share their temporary memory, so nothing may be expected to survive in it from one
    replay to the next: results go to memory from before the capture.
    """

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run`, then record another call of it. Calling the result repeats what was recorded.

        A repetition works on the same memory; no Python of `run` takes part in it.
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
        # What happens only the first time (cuBLAS handles, autotuning) can't be recorded.
        run()
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog) may go on talking to CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free
