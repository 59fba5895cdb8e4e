"""Out of memory at the start: what was asked for, who holds what, and which key helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import WorkerConfig
from engine.device.memory import DeviceMemory
from engine.errors import ConfigError
from engine.memory_need import split_remedies
from engine.worker.sizing.memory_profile import gib

_MARKS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""Texts by which CUDA's libraries report it when torch's own allocator doesn't."""

WEIGHTS, PROFILE, ALLOCATE = "loading the weights", "running the largest step", "allocating"


@contextmanager
def out_of_memory_advice(
    phase: str, config: WorkerConfig, memory: DeviceMemory | None
) -> Iterator[None]:
    """Turns running out of device memory in `phase` into a `ConfigError` with advice.

    `memory` is None on CPU, where the kernel ends a process that takes too much.
    """
    try:
        yield
    except RuntimeError as error:
        if memory is None or not is_out_of_memory(error):
            raise
        raise ConfigError(advice(phase, config, memory)) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch or one of CUDA's libraries found no memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in _MARKS)


def advice(phase: str, config: WorkerConfig, memory: DeviceMemory) -> str:
    """One line: what was asked for in `phase`, who holds the memory, and which keys help."""
    return (
        f"the GPU ran out of memory while {phase}: it has {gib(memory.total())}, this worker's "
        f"tensors take {gib(memory.allocated())} and {gib(memory.elsewhere())} are held outside "
        f"them (other processes, CUDA, NCCL). Change one of: {'; '.join(remedies(phase, config))}."
        f"{holders(memory)}"
    )


def holders(memory: DeviceMemory) -> str:
    """A sentence on other processes that hold much of the device, after a space; or ""."""
    others = memory.other_processes()
    if others:
        listed = ", ".join(f"process {p.pid} holds {gib(p.num_bytes)}" for p in others[:4])
        return f" On the same GPU {listed}: end it or use another GPU."
    if memory.elsewhere() > memory.total() // 10:
        return " Look with nvidia-smi which other process uses this GPU."
    return ""


def remedies(phase: str, config: WorkerConfig) -> list[str]:
    """Keys that free memory, the most useful first, with their values now."""
    split = split_remedies(config.dtype, config.engine.tp_size, config.engine.pp_size)
    if phase == WEIGHTS:
        return split
    rows = f"lower max_running_requests (now {config.engine.max_running_requests})"
    chunk = f"lower chunked_prefill_size (the largest step has {config.max_step_tokens} tokens)"
    length = f"lower max_model_len (now {config.max_model_len})"
    if phase == PROFILE:
        return [chunk, rows, length, *split]
    size = f"lower memory_fraction (now {config.engine.memory_fraction:g})"
    if config.num_kv_tokens is not None:
        size = f"lower max_total_tokens (now {config.num_kv_tokens})"
    if config.engine.kv_cache_dtype == "auto":
        split.insert(0, "set kv_cache_dtype: fp8_e4m3")
    return [size, length, chunk, rows, *split]
