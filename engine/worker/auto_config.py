"""Decides every `auto` of the configuration, on the machine that a worker runs on."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from engine.attention.cpu_backend import has_kernels_for
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import weight_form
from engine.config import EngineConfig, KernelChoice, ResolvedConfig, WorkerConfig
from engine.device.triton_loader import require_triton
from engine.errors import ConfigError
from engine.memory_need import (
    crowding,
    max_cache_tokens,
    max_step_tokens,
    quantized_line,
    shortage,
)
from engine.models.loader import resolve_dtype
from engine.native import library
from engine.native.library import require_kernels, without_kernels
from engine.native.machine import has_bfloat16
from engine.process.host_memory import available_host_bytes, num_cores
from engine.registry import KERNELS, kernels_of
from engine.worker.gpu_kernels import (
    auto_kernels,
    auto_sampling,
    captured_rows,
    check_flashinfer,
)
from engine.worker.sizing.estimate import memory_of, profile_max_tokens

logger = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 256
"""Largest decode batch to capture by default; larger ones keep a GPU busy without graphs."""
SHORT_STEP_S = 0.025
"""Steps below this run on one thread where a server's compute threads take all cores. Two threads
against one, on 2 cores, tokens/s of the 88 M model with 1, 2, 4, 8, 16 and 32 requests: 1.01, 0.71,
0.78, 0.97, 0.89, 1.30."""
SHORT_TORCH_STEP_S = 0.002
"""The same for torch's own operators, each of which waits for all threads."""


def make_worker_config(
    config: ResolvedConfig, *, share: int = 1, serving: bool = False
) -> WorkerConfig:
    """Decide every `auto` on this machine.

    `share` is the number of engines that split this machine's cores and memory. `serving`: other
    processes beside the workers need cores too. Raises
    `ConfigError` if the device isn't there or a KV cache on CPU has no room.
    """
    engine = config.engine
    device = engine.device if engine.device != "auto" else detect_device()
    if device == "cuda" and detect_device() != "cuda":
        raise ConfigError("device is 'cuda' but torch sees no GPU; set device: cpu or auto.")
    engine.check_device(device)
    dtype: str = engine.dtype
    if dtype == "auto":
        dtype = config.model.auto_dtype(device, cpu_has_bfloat16=has_bfloat16())
    threads = engine.cpu_threads
    if threads is None:
        threads = auto_threads(num_cores(), engine.world_size * share, serving=serving)
    if config.model.keeps_states:
        logger.info(
            "%s, keeps states of requests beside attention: no prefix cache, and a request that "
            "gave its memory up is computed again from its first token",
            config.model.title,
        )
    kernels = _kernels(engine, config.model, dtype, device)
    config = replace(config, model=config.model.for_backend(kernels.attention))
    # The worker tries whether the code of another architecture can be captured; of one stage only.
    layout = config.model.layout
    captures = device == "cuda" and (
        layout is None or (layout.mode == "flat" and engine.pp_size == 1)
    )
    worker = WorkerConfig(
        config,
        dtype,
        device,
        num_kv_tokens=engine.max_total_tokens,
        max_kv_tokens=max_cache_tokens(engine, config.max_model_len),
        max_step_tokens=max_step_tokens(engine, config.max_model_len),
        kernels=kernels,
        cpu_threads=threads,
        cuda_graph_max_batch_size=graph_max_batch_size(engine) if captures else 0,
        short_step_s=short_step_s(
            threads * engine.world_size * share, num_cores(), kernels.layers, serving=serving
        ),
    )
    if device == "cuda":
        check_flashinfer(worker)
        worker = replace(worker, cuda_graph_max_batch_size=captured_rows(worker))
    if device == "cpu":
        _check_host(worker, share, serving=serving)
    reads = engine.load_format == "auto" and device != "simulated"
    if reads and not serving and (told := quantized_line(memory_of(worker))):
        logger.info("weights: %s", told)
    return replace(worker, num_kv_tokens=_num_kv_tokens(worker, share))


def _num_kv_tokens(config: WorkerConfig, share: int) -> int | None:
    """KV tokens in whole pages: the stated size, else an estimate on CPU and None on CUDA."""
    tokens = config.num_kv_tokens
    if tokens is None and config.device == "simulated":
        tokens = config.max_kv_tokens
    elif tokens is None and config.device == "cpu":
        tokens = min(profile_max_tokens(config, share), config.max_kv_tokens)
    return None if tokens is None else tokens // config.engine.page_size * config.engine.page_size


def _check_host(config: WorkerConfig, share: int, *, serving: bool) -> None:
    """Raise `ConfigError` if the weights and a stated KV cache can't fit into this host's memory.

    A server's other workers may run on other hosts, or have loaded their part already. So of them
    only this one's part is asked for. The launcher has judged the whole, and said the rest.
    """
    need, free = memory_of(config), available_host_bytes()
    needed = need.stated(config.num_kv_tokens)
    if serving:
        rank = need.rank_weights() + need.states()
        needed = rank + need.cache().num_bytes(config.num_kv_tokens or 0)
        needed += need.adapters // need.num_ranks
    if needed > free:
        raise ConfigError(shortage(needed, free, need.adapters))
    told = crowding(config.engine.world_size * share, num_cores())
    if told and not serving:
        logger.warning("%s", told)


def graph_max_batch_size(engine: EngineConfig) -> int:
    """Rows of the largest decode batch to capture, at most those of a micro-batch, which count
    once for each token if they have drafts; 0 for none."""
    if not engine.enable_cuda_graphs:
        return 0
    rows = engine.pp_max_micro_batch_size
    if rows is None:
        rows = -(-engine.max_running_requests // engine.num_micro_batches)
    if engine.speculative_config is not None:
        rows *= engine.speculative_config.num_speculative_tokens + 1
    return min(rows, engine.cuda_graph_max_batch_size or MAX_GRAPH_ROWS)


def _kernels(engine: EngineConfig, model: ModelConfig, dtype: str, device: str) -> KernelChoice:
    """The kernels that are asked for, or the best that there are. Raises `ConfigError` if some that
    are asked for can't be had on a CPU."""
    fits = has_kernels_for(model)
    best = "torch"
    is_open = engine.kernels == "auto" and kernels_of(engine.attention_backend) not in KERNELS
    if device == "cpu" and fits and is_open:
        best = "cpu" if library.load() is not None else "torch"
    elif device == "cuda" and is_open:
        best = auto_kernels(resolve_dtype(dtype), [call.expanded for call in model.calls])
    choice = engine.kernel_choice(best)
    if device == "cuda" and is_open and engine.sampling_backend == "auto":
        choice = choice._replace(sampling=auto_sampling())
    keys = {"kernels": engine.kernels, "attention_backend": engine.attention_backend}
    for key, word in keys.items():
        if word == "cpu":
            require_kernels(key)
            if not fits:
                raise ConfigError(f"{key} cpu has no kernels for this model's sizes.")
    if choice.sampling == "cpu":
        require_kernels("sampling_backend")
    if choice.sampling == "triton":
        require_triton()
    needed = weight_form(engine.quantization).kernels
    if needed and choice.layers not in needed:
        if fits:
            raise without_kernels("quantization", engine.quantization, library.reason())
        raise ConfigError(
            f"quantization {engine.quantization} has no kernels for this model's sizes. "
            "quantization: auto runs without it."
        )
    if engine.activation_quantization == "int8" and choice.layers != "cpu":
        raise ConfigError(
            f"activation_quantization int8 needs kernels: cpu, and this model runs with kernels: "
            f"{choice.layers}. activation_quantization: auto runs without it."
        )
    return choice


def detect_device() -> str:
    """The device that `auto` means: "cuda" if torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def auto_threads(cores: int, workers: int, *, serving: bool) -> int:
    """Threads of a worker on CPU: the cores divided by the workers.

    Of more than two cores a server leaves one to its other processes. Of two it doesn't: prefills
    and large batches gain more from the second thread than the others lose.
    """
    if serving and cores > 2:
        cores -= 1
    return max(1, cores // workers)


def short_step_s(threads: int, cores: int, kernels: str, *, serving: bool) -> float:
    """`WorkerConfig.short_step_s` where all workers together have `threads` on `cores`."""
    if serving and threads >= cores:
        return SHORT_STEP_S
    return SHORT_TORCH_STEP_S if kernels == "torch" else 0.0
