"""What a worker needs of the configuration, with every `auto` decided."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ResolvedConfig, SimulatedDevice, available_cores
from engine.errors import ConfigError
from engine.model_config import ModelConfig

SMALL_MATRIX = 2**20
"""Elements of an MLP matrix below which more than one thread doesn't pay on CPU."""


@dataclass(frozen=True)
class WorkerConfig:
    """The same for all ranks of an engine. Sizes in tokens, requests and threads."""

    model: ModelConfig
    dtype: str
    device: str
    page_size: int
    num_kv_tokens: int
    max_running_requests: int
    max_model_len: int
    kv_cache_dtype: str
    attention_backend: str
    sampling_backend: str
    load_format: str
    seed: int
    tp_size: int
    pp_size: int
    cpu_threads: int
    simulated: SimulatedDevice

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size

    @property
    def comm_backend(self) -> str:
        """torch.distributed's backend for this device."""
        return "nccl" if self.device == "cuda" else "gloo"


def make_worker_config(config: ResolvedConfig, *, share: int = 1) -> WorkerConfig:
    """Decide every `auto` on this machine.

    `share`: engines on this machine that split its cores and memory. Raises `ConfigError` when
    the device isn't there or the KV cache can't hold one request.
    """
    engine = config.engine
    device = engine.device if engine.device != "auto" else detect_device()
    if device == "cuda" and detect_device() != "cuda":
        raise ConfigError("device is 'cuda' but torch sees no GPU; set device: cpu or auto.")
    dtype = engine.dtype if engine.dtype != "auto" else _auto_dtype(config.model, device)
    threads = engine.cpu_threads
    if threads is None:
        threads = _auto_threads(config.model, engine.world_size * share)
    num_kv_tokens = engine.max_total_tokens
    # Every request at full length, in whole pages: more can never be used.
    pages = -(-config.max_model_len // engine.page_size)
    most = engine.max_running_requests * pages * engine.page_size
    if num_kv_tokens is None and device == "simulated":
        num_kv_tokens = most
    elif num_kv_tokens is None:
        # torch is imported here: config checks elsewhere must not pay for it.
        from engine.worker.memory import profile_max_tokens

        room = profile_max_tokens(
            config.model,
            dtype,
            device,
            engine.tp_size,
            engine.pp_size,
            engine.memory_fraction / (share if device == "cpu" else 1),
            engine.kv_cache_dtype,
        )
        num_kv_tokens = min(room, most)
    return WorkerConfig(
        model=config.model,
        dtype=dtype,
        device=device,
        page_size=engine.page_size,
        num_kv_tokens=num_kv_tokens // engine.page_size * engine.page_size,
        max_running_requests=engine.max_running_requests,
        max_model_len=config.max_model_len,
        kv_cache_dtype=engine.kv_cache_dtype,
        attention_backend=_attention_backend(engine.attention_backend, config.model, dtype, device),
        sampling_backend=_sampling_backend(engine.sampling_backend, device),
        load_format=engine.load_format,
        seed=engine.seed,
        tp_size=engine.tp_size,
        pp_size=engine.pp_size,
        cpu_threads=threads,
        simulated=engine.simulated,
    )


def _attention_backend(name: str, model: ModelConfig, dtype: str, device: str) -> str:
    if name != "auto":
        _check_needs_cuda("attention_backend", name, device)
        return name
    if device != "cuda":
        return "torch"
    from engine.attention.registry import auto_attention_backend
    from engine.models.loader import resolve_dtype

    return auto_attention_backend(device, resolve_dtype(dtype, model), model.head_dim)


def _sampling_backend(name: str, device: str) -> str:
    if name != "auto":
        _check_needs_cuda("sampling_backend", name, device)
        return name
    if device != "cuda":
        return "torch"
    from engine.sampling.registry import auto_sampling_backend

    return auto_sampling_backend(device)


def _check_needs_cuda(key: str, name: str, device: str) -> None:
    if name.startswith("flashinfer") and device != "cuda":
        raise ConfigError(
            f"{key} {name} needs a GPU and the device is '{device}'; set {key}: auto or torch."
        )


def detect_device() -> str:
    """ "cuda" if torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _auto_threads(model: ModelConfig, workers: int) -> int:
    """Cores divided among the machine's workers; one for models whose matrices are too small.

    Measured on 2 cores: with 256 x 1,024 matrices a second thread costs more at each operation's
    barrier than it saves (115 against 75 tokens/s, one request at a time); with 768 x 2,048 it
    pays (13 against 16 tokens/s).
    """
    if model.hidden_size * model.intermediate_size < SMALL_MATRIX:
        return 1
    return max(1, available_cores() // workers)


def _auto_dtype(model: ModelConfig, device: str) -> str:
    if device == "cuda":
        return "bfloat16" if model.dtype == "float32" else model.dtype
    return model.dtype if model.dtype == "bfloat16" and _cpu_has_bfloat16() else "float32"


def _cpu_has_bfloat16() -> bool:
    """Without AVX512-BF16 or AMX, bfloat16 matrix products run 2-5x slower than float32."""
    import torch

    return any(
        getattr(torch.cpu, name, bool)()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
