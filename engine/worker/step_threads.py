"""How many compute threads a step on CPU gets: all of them, or one if it is short.

A second thread shortens a step only if a core is free for it. Where the compute threads leave no
core to a server's other processes, those take turns with them, and a thread that has finished its
part waits for the one that was interrupted. Short steps then run on one thread. No result depends
on it.
"""

from __future__ import annotations

import torch

from engine.attention.forward_batch import ForwardBatch
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.worker.sizing.estimate import plain_weight_bytes, stage_weight_bytes

READ_BYTES_S = 20e9
"""Bytes that a thread reads from memory per second."""
MULTIPLIED_BYTES_S = 130e9
"""Bytes of plain weights that a thread multiplies by a token per second: 65 G products in 16 bits.
With quantized weights it is no less: 65 to 100 G."""


class StepThreads:
    """Sets the number of threads of the calling thread's next step; it has `cpu_threads` so far."""

    def __init__(self, config: WorkerConfig, parallel: ParallelState, kv_bytes_per_token: int):
        self._threads = config.cpu_threads
        self._short_s = config.short_step_s
        self._weight_bytes = stage_weight_bytes(config, parallel)
        self._plain_bytes = plain_weight_bytes(config, parallel)
        self._kv_bytes_per_token = kv_bytes_per_token
        self._now = config.cpu_threads

    def choose(self, batch: ForwardBatch) -> None:
        """Call before the step, in its thread."""
        seconds = self.estimate_s(batch.num_tokens, int(batch.seq_lens_cpu.sum()))
        threads = 1 if seconds < self._short_s else self._threads
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads

    def estimate_s(self, tokens: int, kv_tokens: int) -> float:
        """Seconds that a step takes on one thread of a server's core: `tokens` new ones, whose
        requests have `kv_tokens` in the cache. A few tokens are multiplied while weights are read,
        so they take no time of their own."""
        read = self._weight_bytes + kv_tokens * self._kv_bytes_per_token
        multiplied = tokens * self._plain_bytes
        return max(read / READ_BYTES_S, multiplied / MULTIPLIED_BYTES_S)
