"""The NVIDIA GPUs of this machine, as Ray will find them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path


def has_nvidia_gpu() -> bool:
    """Whether programs may use an NVIDIA GPU on this machine, also under WSL 2."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def gpu_memory() -> list[int]:
    """Bytes of memory of each GPU that is there and that `CUDA_VISIBLE_DEVICES` leaves."""
    if not has_nvidia_gpu():
        return []
    import ray._private.thirdparty.pynvml as nvml
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # the driver isn't there or doesn't answer: Ray finds no GPU either
        return []
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        sizes = [int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    finally:
        nvml.nvmlShutdown()
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return sizes if visible is None else sizes[: len(visible)]


def torch_has_cuda() -> bool:
    """Whether the installed torch is no build for CPUs. Doesn't import it."""
    return not version("torch").endswith("+cpu")
