"""The compiled modules that Manta's calls of FlashInfer load, and whether this machine has them.

FlashInfer compiles a module at its first call unless it is there already: in the package's own
folder (`scripts/build_kernels.py` puts it there) or in a wheel `flashinfer-jit-cache`. Each is a
`JitSpec` of FlashInfer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.device.flashinfer_loader import load_flashinfer

MANIFEST = "manta-kernels.json"
"""In the folder of modules that `scripts/build_kernels.py` made: what GPUs they are for. FlashInfer
takes modules of that folder for right on any GPU."""
TENSOR_CORE_GROUP = 4
"""With at least this many query heads per key/value head, decoding is faster on tensor cores
(SGLang)."""


def decodes_on_tensor_cores(num_heads: int, num_kv_heads: int, kv_dtype: torch.dtype) -> bool:
    """Whether decodes use the prefill kernels, which are those on tensor cores."""
    return num_heads // num_kv_heads >= TENSOR_CORE_GROUP or kv_dtype.itemsize == 1


def prefill_modules(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, window: bool, *, fa3: bool
) -> Iterator[Any]:
    """Attention of prompts: `fa3` by Hopper's kernels. Those of FlashAttention 2 also decode on
    tensor cores."""
    aot = load_flashinfer("flashinfer.aot")
    if fa3:
        yield from aot.gen_fa3(dtype, kv_dtype, dtype, head_dim, head_dim, window, False)
    else:
        yield from aot.gen_fa2(dtype, kv_dtype, head_dim, head_dim, window, False, True)


def decode_modules(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, window: bool
) -> Iterator[Any]:
    """Attention of decodes without tensor cores."""
    aot = load_flashinfer("flashinfer.aot")
    both = list(aot.gen_fa2(dtype, kv_dtype, head_dim, head_dim, window, False))
    prefill = {spec.name for spec in prefill_modules(dtype, kv_dtype, head_dim, window, fa3=False)}
    yield from (spec for spec in both if spec.name not in prefill)


def operator_modules() -> Iterator[Any]:
    """What `engine.layers.fused_ops` calls."""
    yield load_flashinfer("flashinfer.jit.activation").gen_act_and_mul_module("silu")
    yield load_flashinfer("flashinfer.jit.norm").gen_norm_module()
    yield load_flashinfer("flashinfer.jit.rope").gen_rope_module()


def missing(modules: Iterable[Any]) -> list[str]:
    """Names of the `modules` that FlashInfer would have to compile."""
    return [spec.name for spec in modules if not spec.aot_artifacts]


def compiler_lack() -> str:
    """Why FlashInfer can't compile on this machine; "" if it can."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set"
    try:
        nvcc = Path(load_flashinfer("flashinfer.jit.cpp_ext").get_cuda_path(), "bin", "nvcc")
    except RuntimeError:  # neither nvcc nor CUDA's usual folder
        return "there is no nvcc"
    if not os.access(nvcc, os.X_OK):
        return f"there is no nvcc at {nvcc}"
    for program in ("ninja", os.environ.get("CXX", "c++").split()[0]):
        if shutil.which(program) is None:
            return f"there is no {program} on the PATH"
    return ""


def write_manifest(folder: Path, architectures: list[str]) -> None:
    """Note beside the modules in `folder` which compute capabilities they are for, as "9.0a"."""
    (folder / MANIFEST).write_text(json.dumps({"architectures": architectures}) + "\n")


def unsuitable_gpu() -> str:
    """Why the package's own modules can't run on this process' GPU; "" if they can or if FlashInfer
    finds its modules elsewhere."""
    manifest = Path(load_flashinfer().__file__).parent / "data" / "aot" / MANIFEST
    if not manifest.is_file():
        return ""
    built: list[str] = json.loads(manifest.read_text())["architectures"]
    capability = torch.cuda.get_device_capability()
    if any(_runs_on(architecture, capability) for architecture in built):
        return ""
    return (
        f"they were compiled for compute capability {' and '.join(built)}, and the GPU has "
        f"{capability[0]}.{capability[1]}"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a program for `architecture` runs on a GPU: that for "8.0" on all of 8.x, that for
    "9.0a" on 9.0 alone. (CUDA's binary compatibility.)"""
    major, minor = architecture.split(".")
    built = (int(major), int(minor.rstrip("af")))
    if minor.endswith("a"):
        return built == capability
    return built[0] == capability[0] and built[1] <= capability[1]
