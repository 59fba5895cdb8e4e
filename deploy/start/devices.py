"""Whether this machine's memory, cores and GPUs hold the engines that a server will start.

The figures and the sentences are those of `engine.memory_need`, by which workers judge too.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from ray._private.ray_constants import RESOURCES_ENVIRONMENT_VARIABLE
from ray._private.utils import get_num_cpus

from deploy.start.gpus import gpu_memory, torch_has_cuda
from engine.actors.cluster_gpus import gpu_shortage
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import weight_form
from engine.errors import ConfigError
from engine.memory_need import (
    GIB,
    MemoryNeed,
    crowding,
    draft_of,
    gpu_cache_shortage,
    gpu_weights_shortage,
    host_cache_tokens,
    max_cache_tokens,
    quantized_line,
    shortage,
    split_remedies,
)
from engine.native import library
from engine.native.library import without_kernels
from engine.native.machine import has_bfloat16
from engine.process.host_memory import available_host_bytes, num_cores
from engine.scheduler.scheduler_config import SchedulerConfig

PROCESS_BYTES = 1_200 << 20
"""Memory that Ray, Serve and our own processes take besides the model, with one replica on CPU
(measured: 1.1 GiB for a whole pod)."""
TOKENIZER_BYTES = 200 << 20
"""Memory that the tokenizer of one more model takes."""
REPLICA_BYTES = 300 << 20
"""Memory that the processes of one more replica take."""


def check_devices(apps: list[Any]) -> list[str]:
    """What to tell the user of the devices of `AppConfig`s. Raises `ConfigError` where their
    engines can't start."""
    devices = [device_of(app) for app in apps]
    for app, device in zip(apps, devices, strict=True):
        app.engine.check_device(device)
    _check_reservations(apps, devices)
    on_gpus = [app for app, device in zip(apps, devices, strict=True) if device == "cuda"]
    on_cpu = [app for app, device in zip(apps, devices, strict=True) if device == "cpu"]
    return _check_gpus(on_gpus) + _check_cpu(on_cpu)


def device_of(app: Any) -> str:
    """What `device: auto` of an `AppConfig` will be: the GPUs must hold one whole engine."""
    if app.engine.device != "auto":
        return str(app.engine.device)
    return "cuda" if len(gpu_memory()) >= app.engine.world_size else "cpu"


def is_on_cpu(app: Any) -> bool:
    """Whether the workers of an `AppConfig` compute on this machine's CPUs."""
    return device_of(app) == "cpu"


def draft_model(app: Any) -> ModelConfig | None:
    """The shape of the draft model of an `AppConfig`, if it has one."""
    drafts = app.engine.speculative_config
    return draft_of(drafts.model if drafts is not None else None)


def need_of(app: Any) -> MemoryNeed:
    """What the ranks of one engine of an `AppConfig` take, on the device that it will have."""
    device = device_of(app)
    dtype = app.engine.dtype
    if dtype == "auto":
        dtype = app.resolved.model.auto_dtype(device, cpu_has_bfloat16=has_bfloat16())
    best = "flashinfer" if device == "cuda" else "torch" if library.lack() else "cpu"
    return MemoryNeed.of(app.resolved, dtype, app.engine.kernel_choice(best), device)


def model_bytes(app: Any) -> int:
    """Bytes that all engines of an `AppConfig` take on this machine's CPUs: weights, and the KV
    cache if the size of that is stated."""
    return int(app.max_replicas * need_of(app).stated(app.engine.max_total_tokens))


def memory_bytes(app: Any) -> int:
    """`model_bytes` and the memory that all processes take besides."""
    base = PROCESS_BYTES if app.is_first else TOKENIZER_BYTES + REPLICA_BYTES
    return model_bytes(app) + base + (app.max_replicas - 1) * REPLICA_BYTES


def cache_tokens(app: Any, free: int) -> int:
    """KV tokens of an engine of an `AppConfig` on CPU, in whole pages: the stated number, or what
    `free` bytes allow."""
    engine = app.engine
    tokens = engine.max_total_tokens
    if tokens is None:
        need = need_of(app)
        tokens = host_cache_tokens(need, free, engine.memory_fraction, app.engines_per_node)
        tokens = min(tokens, max_cache_tokens(engine, app.resolved.max_model_len))
    return int(tokens // engine.page_size * engine.page_size)


def memory_line(app: Any) -> str:
    """What an `AppConfig` takes of memory, for a person."""
    device = device_of(app)
    if device == "cuda":
        need = need_of(app)
        each = "its GPU" if need.num_ranks == 1 else f"each of {need.num_ranks} GPUs"
        return f"the weights of an engine take {need.rank_weights() / GIB:.1f} GiB of {each}"
    if device == "cpu":
        cache = "" if app.engine.max_total_tokens else ", and for the KV cache a part of the rest"
        return f"on CPU it takes about {memory_bytes(app) / GIB:.1f} GiB of memory{cache}"
    return "a simulated device takes no memory for weights and KV cache"


def weights_line(app: Any) -> str:
    """What becomes of an `AppConfig`'s quantized weights, for a person; "" if they are plain."""
    reads = app.engine.load_format == "auto" and device_of(app) != "simulated"
    return quantized_line(need_of(app)) if reads else ""


def _check_cpu(apps: list[Any]) -> list[str]:
    for app in apps:
        _check_kernels(app)
    free, needed = available_host_bytes(), sum(map(memory_bytes, apps))
    told = []
    if needed > free:
        adapters = sum(app.max_replicas * need_of(app).adapters for app in apps)
        told = [shortage(needed, free, adapters)]
        if sum(map(model_bytes, apps)) > free:
            raise ConfigError(told[0])
    for app in apps:
        room = free - (needed - model_bytes(app))
        SchedulerConfig(app.resolved, cache_tokens(app, max(room, 0)))
    workers = sum(app.max_replicas * app.engine.world_size for app in apps)
    return [*told, *filter(None, [crowding(workers, num_cores())])]


def _check_kernels(app: Any) -> None:
    """Raise `ConfigError` if a key asks for CPU kernels and there will be none."""
    lack = library.lack()
    if not lack:
        return
    for key in ("kernels", "attention_backend", "sampling_backend"):
        if getattr(app.engine, key) == "cpu":
            raise without_kernels(key, "cpu", lack)
    if "cpu" in weight_form(app.engine.quantization).kernels:
        raise without_kernels("quantization", app.engine.quantization, lack)


def _check_reservations(apps: list[Any], devices: list[str]) -> None:
    """Raise `ConfigError` if engines reserve more of Ray than a cluster of this machine has: they
    would wait for good."""
    reserved: Counter[str] = Counter()
    for app, device in zip(apps, devices, strict=True):
        bundles = app.placement_bundles(use_gpu=device == "cuda")
        for bundle in bundles * min_replicas(app):
            reserved.update(bundle)
        ingress = app.ingress_actor_options()
        for _ in range(app.server.ingress_replicas if app.is_first else 0):
            reserved.update({"CPU": ingress["num_cpus"], **ingress.get("resources", {})})
    cpus = get_num_cpus()
    if round(reserved["CPU"], 6) > cpus:  # hundredths, summed up
        raise ConfigError(
            f"engines and ingresses reserve {reserved['CPU']:g} of Ray's logical CPUs, and this "
            f"machine has {cpus:g}. Lower num_replicas, tp_size or pp_size."
        )
    custom = sorted(reserved.keys() - {"CPU", "GPU"})
    if custom and not os.environ.get(RESOURCES_ENVIRONMENT_VARIABLE):
        raise ConfigError(
            f"ingress_resources, engine_resources and worker_resources name '{custom[0]}', which "
            "the cluster that starts here doesn't have. Leave them out, or set RAY_ADDRESS to a "
            "cluster whose nodes have them."
        )


def min_replicas(app: Any) -> int:
    """Engines of an `AppConfig` that must start before it serves."""
    scaling = app.server.autoscaling
    return int(app.server.num_replicas if scaling is None else scaling.min_replicas)


def _check_gpus(apps: list[Any]) -> list[str]:
    if not apps:
        return []
    sizes = gpu_memory()
    for app in apps:
        engine = app.engine
        if short := gpu_shortage(engine.tp_size, engine.pp_size, [len(sizes)] if sizes else []):
            raise ConfigError(f"device is 'cuda', and {short}.")
        if not torch_has_cuda():
            raise ConfigError(
                "device is 'cuda' but torch sees no GPU; set device: cpu or auto. (The installed "
                "torch is a build for CPUs: docs/gpu.md#install)"
            )
        need, total = need_of(app), min(sizes)
        told = gpu_weights_shortage(
            need.rank_weights(),
            total,
            total,
            engine.memory_fraction,
            split_remedies(need.dtype, need.tp_size, need.pp_size),
        )
        tokens = engine.max_total_tokens or app.resolved.max_model_len
        if told := told or gpu_cache_shortage(need, total, engine, tokens):
            raise ConfigError(told)
    least = sum(min_replicas(app) * app.engine.world_size for app in apps)
    if least > len(sizes):
        raise ConfigError(
            f"num_replicas x tp_size x pp_size needs {least} GPUs, one for each worker, "
            f"and this machine has {len(sizes)}. Lower one of them."
        )
    most = sum(app.max_replicas * app.engine.world_size for app in apps)
    if most > len(sizes):
        return [
            f"autoscaling.max_replicas needs {most} GPUs and this machine has "
            f"{len(sizes)}: the last replicas will never start"
        ]
    return []
