"""Which kernels a GPU's worker uses, and whether they can be had on its machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from engine.attention.flashinfer_backend import (
    check_attention,
    lack_of_attention,
    max_captured_rows,
)
from engine.attention.kv_pool import resolve_kv_dtype
from engine.checkpoint.layout import AttentionCall
from engine.config import WorkerConfig
from engine.device.flashinfer_loader import (
    FLASHINFER,
    FLASHINFER_FA3,
    check_fa3,
    flashinfer_installed,
    load_flashinfer,
)
from engine.device.flashinfer_modules import (
    compiler_lack,
    decode_modules,
    decodes_on_tensor_cores,
    missing,
    operator_modules,
    prefill_modules,
    unsuitable_gpu,
)
from engine.device.triton_loader import lack_of_triton, require_triton
from engine.errors import ConfigError
from engine.models.loader import resolve_dtype
from engine.registry import kernels_of

logger = logging.getLogger(__name__)

_SLOW = "the GPU computes with torch's operators, and a step takes many times as long"


def auto_kernels(dtype: torch.dtype, calls: Sequence[AttentionCall]) -> str:
    """What `kernels: auto` means on a GPU: flashinfer if it is installed and has kernels for the
    model. Otherwise torch, with a warning that says why."""
    if lack := lack_of_attention(dtype, calls):
        logger.warning("%s: %s", lack, _SLOW)
        return "torch"
    if not flashinfer_installed():
        logger.warning(
            "FlashInfer isn't installed: %s. Install it with `pip install 'manta-serve[gpu]'` "
            "(docs/gpu.md)",
            _SLOW,
        )
        return "torch"
    return FLASHINFER


def auto_sampling() -> str:
    """What `sampling_backend: auto` means on a GPU where `kernels` is auto, too: triton if it can
    run. Otherwise torch, with a warning that says why."""
    lack = lack_of_triton()
    if not lack:
        return "triton"
    logger.warning("%s: tokens are drawn with torch's operators, and top_p sorts", lack)
    return "torch"


def check_flashinfer(config: WorkerConfig) -> None:
    """Raise `ConfigError` if `config` needs kernels of FlashInfer that are neither compiled nor can
    be compiled here.

    Without this the first step would fail, once the weights are loaded.
    """
    if FLASHINFER not in map(kernels_of, config.kernels):
        return
    load_flashinfer()
    if kernels_of(config.kernels.attention) == FLASHINFER:
        check_attention(resolve_dtype(config.dtype), config.model.calls)
        require_triton()
    if config.kernels.attention == FLASHINFER_FA3:
        check_fa3(torch.cuda.get_device_capability())
    way_out = "or set kernels: torch, which is much slower."
    if why := unsuitable_gpu():
        raise ConfigError(
            f"FlashInfer's kernels can't run on this GPU: {why}. Build the image with "
            f"--build-arg CUDA_ARCHS=... for this GPU, {way_out}"
        )
    lacking = _missing_kernels(config)
    if not lacking:
        return
    lack = compiler_lack()
    if lack:
        raise ConfigError(
            f"FlashInfer has no compiled kernels for {'; '.join(lacking)}, and can't compile them "
            f"here: {lack}. Run `flashinfer download-kernels`, install CUDA's nvcc with ninja and "
            f"a C++ compiler, build the image with such kernels (KERNELS in the Dockerfile), "
            f"{way_out}"
        )
    logger.info("FlashInfer compiles kernels at their first use, for minutes: %s", lacking)


def captured_rows(config: WorkerConfig) -> int:
    """`config.cuda_graph_max_batch_size`, or fewer where the attention has room for fewer.

    Raises `ConfigError` if that many were asked for.
    """
    rows = config.cuda_graph_max_batch_size
    if not rows or kernels_of(config.kernels.attention) != FLASHINFER:
        return rows
    engine = config.engine
    kv_dtype = resolve_kv_dtype(engine.kv_cache_dtype, resolve_dtype(config.dtype))
    most = max_captured_rows(config.model.calls[0].on_rank(engine.tp_size), kv_dtype)
    if most is None or rows <= most:
        return rows
    if engine.cuda_graph_max_batch_size is not None:
        raise ConfigError(
            f"cuda_graph_max_batch_size {engine.cuda_graph_max_batch_size}: FlashInfer's workspace "
            f"has room for graphs of at most {most} rows of this model; lower it to that."
        )
    return most


def _missing_kernels(config: WorkerConfig) -> list[str]:
    """What FlashInfer would have to compile, in the words of the configuration."""
    wanted: dict[str, list[Any]] = {}
    if kernels_of(config.kernels.attention) == FLASHINFER:
        wanted |= _attention_modules(config)
    if config.kernels.layers == FLASHINFER:
        wanted["norms, RoPE and activations"] = list(operator_modules())
    return [name for name, modules in wanted.items() if missing(modules)]


def _attention_modules(config: WorkerConfig) -> dict[str, list[Any]]:
    model, dtype = config.model, resolve_dtype(config.dtype)
    kv_dtype = resolve_kv_dtype(config.engine.kv_cache_dtype, dtype)
    call = model.calls[0].on_rank(config.engine.tp_size)
    on_tensor_cores = decodes_on_tensor_cores(
        call.num_heads,
        call.num_kv_heads,
        kv_dtype,
    )
    fa3 = config.kernels.attention == FLASHINFER_FA3
    found = {}
    for window in sorted({call.window is not None for call in model.calls}):
        sizes = (dtype, kv_dtype, model.head_dim, window)
        modules = list(prefill_modules(*sizes, fa3=fa3))
        if not on_tensor_cores:
            modules += decode_modules(*sizes)
        elif fa3:
            modules += prefill_modules(*sizes, fa3=False)
        name = (
            f"attention of {config.dtype} with kv_cache_dtype {config.engine.kv_cache_dtype}, "
            f"head_dim {model.head_dim}{', FlashAttention 3' if fa3 else ''}"
            f"{', sliding windows' if window else ''}"
        )
        found[name] = modules
    return found
