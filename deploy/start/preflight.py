"""What can be known of this machine before a server starts on it."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from deploy.http.access.listening import is_loopback
from deploy.start.target import Target
from engine.checkpoint_files import find_weight_files, locate_tensors
from engine.errors import ConfigError
from engine.host_memory import available_host_bytes

PROCESS_BYTES = 1_200 << 20
"""Memory that Ray, Serve and our own processes take besides the model, with one replica on CPU
(measured: 1.1 GiB for a whole pod)."""
REPLICA_BYTES = 300 << 20
"""Memory that the processes of one more replica take."""
SHARED_MEMORY_BYTES = 64 << 20
"""The least of /dev/shm that Ray's object store needs; with less it moves to the disk."""
GIB = 1 << 30


def check_machine(target: Target) -> list[str]:
    """What to tell the user, in sentences. Raises `ConfigError` where the start can't succeed."""
    warnings: list[str] = []
    host = str(target.http["host"])
    for app in target.applications:
        if app.engine.load_format == "auto":
            check_weights(Path(app.resolved.model.path))
    if sys.platform == "linux":
        warnings += _check_memory([app for app in target.applications if is_on_cpu(app)])
    if not is_loopback(host) and not target.http.get("ssl_certfile"):
        warnings.append("what clients send crosses the network unencrypted, keys too, without TLS")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < SHARED_MEMORY_BYTES:
        warnings.append(
            "/dev/shm has less than 64 MiB (in Docker: --shm-size 2g); Ray uses the disk instead"
        )
    return warnings


def check_weights(folder: Path) -> None:
    """Raise `ConfigError` unless the model folder has all its weights in complete files."""
    locate_tensors(folder, find_weight_files(folder), partial(_tensors_in, folder))


def _tensors_in(folder: Path, name: str) -> list[str]:
    file = folder / name
    try:
        with safe_open(str(file), framework="numpy") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} can't be read: {error}. Download it again.") from error


def model_bytes(app: Any) -> int:
    """About how many bytes the weights of an `AppConfig` take on this machine's CPUs, with its KV
    cache if the size of that is stated."""
    engine, model = app.engine, app.resolved.model
    wide = "float32" in (engine.dtype, model.dtype if engine.dtype == "auto" else "")
    item = 4 if wide else 2
    folder = Path(model.path)
    names = [file.name for file in folder.glob("*.safetensors")]
    if engine.load_format == "auto":
        names = find_weight_files(folder).names
    weights = sum((folder / name).stat().st_size for name in names)
    if model.dtype != "float32" and item == 4:
        weights *= 2
    if engine.quantization == "int8":
        # A byte for each number, but the table of embeddings is as wide as `dtype`.
        table = model.vocab_size * model.hidden_size
        weights = weights // item + table * (item if model.tie_word_embeddings else item - 1)
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    cache = (engine.max_total_tokens or 0) * token * (item + 4)  # decoding keeps float32 copies
    return int(app.max_replicas * (weights + cache))


def memory_bytes(app: Any) -> int:
    """`model_bytes` and the memory that all processes take besides, in bytes."""
    return model_bytes(app) + PROCESS_BYTES + (app.max_replicas - 1) * REPLICA_BYTES


def _check_memory(apps: list[Any]) -> list[str]:
    free = available_host_bytes()
    needed = sum(map(memory_bytes, apps))
    advice = (
        f"this needs about {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free. "
        "Lower max_total_tokens or num_replicas, set a smaller dtype or model, or end other "
        "programs."
    )
    if sum(map(model_bytes, apps)) > free:
        raise ConfigError(advice)
    return [advice] if needed > free else []


def is_on_cpu(app: Any) -> bool:
    """Whether the workers of an `AppConfig` compute on this machine's CPUs, as far as is known
    before Ray runs."""
    device = app.engine.device
    return device == "cpu" or (device == "auto" and not has_nvidia_gpu())


def has_nvidia_gpu() -> bool:
    """Whether programs may use an NVIDIA GPU on this machine, also under WSL 2."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
