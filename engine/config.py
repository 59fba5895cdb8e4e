"""Engine configuration: every key, its default, and the errors with their advice.

`docs/configuration.md` is the reference; a test keeps the two in step.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.checkpoint.adapter import PeftAdapter, check_adapter_name
from engine.checkpoint.expert_map import ExpertMap
from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.generation_defaults import read_generation_defaults
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.pooling_defaults import read_pooling
from engine.checkpoint.weight_formats import check_form
from engine.errors import ConfigError
from engine.other_names import OTHER_NAMES
from engine.protocol.pooling import Pooling
from engine.registry import (
    ATTENTION_BACKENDS,
    EVICTION_POLICIES,
    KERNELS,
    SAMPLING_BACKENDS,
    SCHEDULE_POLICIES,
    WEIGHT_FORMATS,
    kernels_of,
    sampling_of,
)
from engine.speculative.config import SpeculativeConfig

M = TypeVar("M", bound=BaseModel)

MAX_MICRO_BATCHES = 16
"""Hidden states that may be on their way from a stage to the next one (`MAX_PENDING_SENDS`)."""


MAX_ROWS = 8192
"""Largest `max_running_requests`."""


class SimulatedDevice(BaseModel):
    """What a step costs on each stage of `device: simulated`:
    `step_ms + token_us * tokens + context_ns * tokens of context read`."""

    model_config = ConfigDict(extra="forbid")

    step_ms: float = Field(default=10.0, ge=0.0)
    token_us: float = Field(default=0.0, ge=0.0)
    """Microseconds per input token of the step (prompt chunks and decodes)."""
    context_ns: float = Field(default=0.0, ge=0.0)
    """Nanoseconds per token in the KV cache of the step's rows."""
    transfer_ms: float = Field(default=0.0, ge=0.0)
    """Milliseconds of a transfer from one pipeline stage to the next."""
    draft_acceptance: float = Field(default=0.7, ge=0.0, le=1.0)
    """With speculative_config: probability that a draft is right, whatever the method."""
    drafts_on: Literal["host", "device"] = "host"
    """host: a step whose drafts depend on the step before waits until that one's tokens are on the
    host. device: it waits for nothing."""
    script_token_id: int | None = Field(default=None, ge=0)
    """Set: an output is what stands in its prompt between the last two tokens of this id, where the
    chat template wrote it (to test clients). None: outputs are a hash."""

    def seconds(self, num_tokens: int, num_context: int) -> float:
        """Length of a step with `num_tokens` inputs whose rows hold `num_context` tokens."""
        return (
            self.step_ms / 1e3
            + self.token_us / 1e6 * num_tokens
            + (self.context_ns / 1e9 * num_context)
        )


class KernelChoice(NamedTuple):
    """Which kernels compute what. Nothing is auto."""

    layers: str
    """Word of `KERNELS`."""
    attention: str
    """Word of `ATTENTION_BACKENDS`."""
    sampling: str
    """Word of `SAMPLING_BACKENDS`."""


class EngineConfig(BaseModel):
    """One engine: a model, its parallel layout, its KV cache and its scheduler.

    Sizes named `*_tokens`, `*_size` and `*_len` are in tokens unless said otherwise.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = "models/manta-small"
    """Model folder, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None: its main branch, as it is at the start."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's type, but float32 on a CPU without bfloat16 instructions."""
    device: Literal["auto", "cpu", "cuda", "simulated"] = "auto"
    """simulated: a device that takes a set time and computes nothing (benchmarks)."""
    simulated: SimulatedDevice = Field(default_factory=SimulatedDevice)
    """Step times of `device: simulated`."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """native: Manta's own code of the architecture. transformers: that of the library of this name,
    for any of its decoders. auto: native where there is one."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights (benchmarks)."""
    seed: int = 0
    """Seed of dummy weights."""
    tp_size: int = Field(1, ge=1)
    pp_size: int = Field(1, ge=1)
    ep_size: int | None = Field(None, ge=1)
    """Groups of tensor parallel ranks among which a mixture's experts are divided; a group's ranks
    divide each of its experts. None: as many groups as can be."""
    expert_map: str | None = None
    """File that says which experts stand on which of these groups; None: they stand in order."""
    cpu_threads: int | None = Field(None, ge=1)
    """Compute threads of each worker on CPU; None: cores / workers, but 1 for tiny models."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt + output; None: the model's own limit."""
    page_size: int = Field(16, ge=1, le=256)
    max_total_tokens: int | None = Field(None, ge=2, le=2**30)
    """KV cache size; None: from memory."""
    memory_fraction: float = Field(0.85, gt=0.0, le=1.0)
    """CUDA: share of the device's memory that the engine may take. CPU: share of the free memory
    for the KV cache."""
    max_running_requests: int = Field(256, ge=1, le=MAX_ROWS)
    max_queued_requests: int = Field(2048, ge=1)
    """With this number of requests waiting, new ones are refused with 429."""
    chunked_prefill_size: int = Field(512, ge=-1)
    """Prompt tokens per step; -1 or 0 switches chunking off."""
    max_prefill_tokens: int = Field(16384, ge=1)
    """Prompt tokens per step when chunking is off."""
    enable_dynamic_chunking: bool = False
    """Chunks behind longer prefixes are shorter, so that all chunks take the same time."""
    enable_mixed_chunk: bool = True
    """Prefill steps also run decodes."""
    schedule_policy: Literal[*SCHEDULE_POLICIES] = "lpm"  # type: ignore[valid-type]
    schedule_conservativeness: float = Field(1.0, gt=0.0, le=10.0)
    """Scales new_token_ratio: higher admits fewer requests and retracts less."""
    enable_priority_preemption: bool = False
    """With schedule_policy priority: a waiting request may push out less important running ones."""
    enable_overlap: bool = True
    """Compose and send step t+1 while step t runs. With pp_size > 1: run several micro-batches, so
    that all stages work at once. False: one step at a time."""
    enable_prefix_cache: bool = True
    eviction_policy: Literal[*EVICTION_POLICIES] = "lru"  # type: ignore[valid-type]
    swa_full_tokens_ratio: Literal["auto"] | Annotated[float, Field(gt=0.0, le=1.0)] = "auto"
    """Tokens that layers with sliding windows have room for, of each token of the KV cache. 1: as
    many as the others. auto: from how much of a token is in which layers."""
    enable_kv_events: bool = False
    """Tell subscribers what enters and leaves the prefix cache. The application switches it on if
    it chooses replicas by the contents of their caches."""
    enable_expert_metrics: bool = False
    """Count how many tokens each expert of a mixture gets."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: requests that leave out one of `engine.protocol.sampling_params.MODEL_DEFAULTS` get the
    model's value, from its generation_config.json. none: Manta's defaults."""
    pooling: Literal["auto", "last", "mean"] = "auto"
    """Of embeddings: the last hidden state or the mean of all. auto: what the model's folder says
    (`1_Pooling/config.json`), else last."""
    quantization: Literal["auto", *WEIGHT_FORMATS] = "auto"  # type: ignore[valid-type]
    """auto: as the checkpoint has them, plain ones in `dtype`. int8, int4: plain matrices are
    rounded as they are read; CPU only."""
    activation_quantization: Literal["auto", "none", "int8"] = "auto"
    """Inputs of products with quantized weights, by the kernels for CPUs. none: as precise as
    `dtype`. int8: 8 bits with a scale for each 32. auto: int8, but none in float32."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """auto: the model's type."""
    kernels: Literal["auto", *KERNELS] = "auto"  # type: ignore[valid-type]
    """What computes attention, sampling, matrix products and the small operations between them.
    auto: those of `attention_backend` if that is set, else the fastest that can be had."""
    attention_backend: Literal["auto", *ATTENTION_BACKENDS] = "auto"  # type: ignore[valid-type]
    sampling_backend: Literal["auto", *SAMPLING_BACKENDS] = "auto"  # type: ignore[valid-type]
    enable_cuda_graphs: bool = True
    """On CUDA: decode steps are captured when the engine starts and launched as a whole."""
    cuda_graph_max_batch_size: int | None = Field(None, ge=1)
    """Larger decode batches run eagerly; None: max_running_requests, at most 256."""
    pp_async_depth: int = Field(0, ge=0, le=8)
    """Micro-batches in flight beyond pp_size."""
    pp_max_micro_batch_size: int | None = Field(None, ge=1)
    """Running requests per micro-batch; None: max_running_requests / micro-batches."""
    speculative_config: SpeculativeConfig | None = None
    """Drafts of the next tokens, several of which a step may confirm; None: one token a step."""
    lora_adapters: dict[str, str] = Field(default_factory=dict)
    """LoRA adapters that clients may name as their model: name and folder of each."""
    lora_folder: str | None = None
    """A folder whose folders are such adapters, too; each is read when it is first asked for."""
    lora_load_folders: list[str] = Field(default_factory=list)
    """Folders below which adapters may lie that clients load by HTTP; empty: they may load none."""
    max_loras: int = Field(4, ge=1, le=256)
    """Adapters whose requests run at once."""
    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters in the host's memory; None: 16, or as many as are listed or run at once."""
    max_lora_rank: int = Field(64, ge=1, le=1024)
    queue_timeout_s: float | None = Field(None, gt=0)
    """A request that waits longer than this ends with 503."""
    request_timeout_s: float | None = Field(None, gt=0)
    """A request older than this ends with 408."""

    def sampling_defaults(self, model: ModelConfig) -> dict[str, float]:
        """Sampling fields that `model` sets for requests. Raises `ConfigError`."""
        if self.generation_config == "none":
            return {}
        return read_generation_defaults(model.path, model.vocab_size)

    def kernel_choice(self, best: str) -> KernelChoice:
        """What `auto` means for kernels where `best` are the fastest that can be had."""
        layers = self.kernels
        if layers == "auto":
            family = kernels_of(self.attention_backend)
            layers = family if family in KERNELS else best
        attention, sampling = self.attention_backend, self.sampling_backend
        return KernelChoice(
            layers,
            layers if attention == "auto" else attention,
            sampling_of(layers) if sampling == "auto" else sampling,
        )

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have adapters."""
        return bool(self.lora_adapters) or self.takes_more_adapters

    @property
    def takes_more_adapters(self) -> bool:
        """Whether requests may have adapters that aren't listed."""
        return bool(self.lora_load_folders) or self.lora_folder is not None

    @property
    def max_held_loras(self) -> int:
        """Adapters in the host's memory."""
        return self.max_cpu_loras or max(16, self.max_loras, len(self.lora_adapters))

    @property
    def world_size(self) -> int:
        """Number of workers of one engine."""
        return self.tp_size * self.pp_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that the scheduler cycles through."""
        if self.pp_size == 1 or not self.enable_overlap:
            return 1
        return self.pp_size + self.pp_async_depth

    @property
    def lookahead(self) -> int:
        """Steps of one micro-batch that may be in flight."""
        return 2 if self.enable_overlap and self.pp_size == 1 else 1

    @property
    def draft_tokens(self) -> int:
        """KV tokens that a request may hold beyond its own; 0 without speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.spare_tokens

    def _check_draft_model(
        self, drafts: SpeculativeConfig, target: ModelConfig, max_len: int
    ) -> None:
        if drafts.model is None:
            return
        draft = ModelConfig.from_pretrained(resolve_model_path(drafts.model))
        if draft.keeps_states:
            raise ConfigError(
                f"speculative_config.model {drafts.model} keeps states of requests beside "
                "attention, which drafts can't go back in; choose another model."
            )
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft model has a vocabulary of {draft.vocab_size} tokens and the model one "
                f"of {target.vocab_size}; speculative_config.model must have the model's own "
                "tokenizer."
            )
        if draft.max_position_embeddings < max_len:
            raise ConfigError(
                f"the draft model takes {draft.max_position_embeddings} tokens and max_model_len "
                f"is {max_len}; lower max_model_len or choose another speculative_config.model."
            )
        if self.pp_size > 1 or not self.enable_overlap:
            raise ConfigError(
                f"speculative_config.method {drafts.method} needs pp_size: 1 and "
                "enable_overlap: true; set them, or choose ngram or suffix."
            )

    def _place_experts(self, path: str, model: ModelConfig) -> ModelConfig:
        layout = model.layout
        groups = 1 if layout is None else layout.expert_groups(self.tp_size, self.ep_size)
        if layout is None or not layout.mixtures or groups == 1:
            raise ConfigError(
                f"expert_map places experts on groups of workers, and of {model.title} every "
                "worker has a part of all; leave it out, or set tp_size and ep_size above 1."
            )
        return replace(model, layout=ExpertMap.read(path).place(layout, groups))

    def _check_adapters(self) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) is below max_loras ({self.max_loras}): what "
                "runs is in the host's memory, too; raise it or leave it out."
            )
        for name, folder in self.lora_adapters.items():
            check_adapter_name(name)
            PeftAdapter.open(Path(folder)).check_rank(self.max_lora_rank)
        named = [("lora_load_folders", folder) for folder in self.lora_load_folders]
        if self.lora_folder is not None:
            named.append(("lora_folder", self.lora_folder))
        for key, folder in named:
            if not Path(folder).is_dir():
                raise ConfigError(f"{key}: {folder} is no folder of this machine; correct it.")

    def check_device(self, device: str) -> None:
        """Raise `ConfigError` if a key needs another device than `device`, which may be what
        `device: auto` has become."""
        if (
            device == "cuda"
            and self.speculative_config is not None
            and self.speculative_config.model
        ):
            raise ConfigError(
                f"speculative_config.method {self.speculative_config.method} runs on CPU only so "
                "far; choose ngram or suffix, or set device: cpu."
            )
        for key in ("kernels", "attention_backend", "sampling_backend"):
            name = getattr(self, key)
            if name == "cpu" and device != "cpu":
                raise ConfigError(f"{key} cpu needs device cpu, and the device is '{device}'.")
            if name.startswith(("flashinfer", "triton")) and device != "cuda":
                raise ConfigError(
                    f"{key} {name} needs a GPU and the device is '{device}'; set {key}: auto or "
                    "torch."
                )
        check_form(self.quantization, "device", device)
        if self.activation_quantization == "int8" and device != "cpu":
            raise ConfigError(
                f"activation_quantization int8 needs device: cpu, not {device}; set it, or leave "
                "activation_quantization out."
            )

    def has_short_activations(self, dtype: str) -> bool:
        """Whether inputs of products with quantized weights have 8 bits. `dtype`: the model's."""
        if self.activation_quantization == "auto":
            return dtype != "float32"
        return self.activation_quantization == "int8"

    def resolve(self) -> ResolvedConfig:
        """Read the model's config and check every size against it. Raises `ConfigError`."""
        folder = resolve_model_path(self.model, self.revision)
        model = ModelConfig.from_pretrained(folder, self.model_impl)
        max_len = self.max_model_len or model.max_position_embeddings
        if max_len > model.max_position_embeddings:
            raise ConfigError(
                f"max_model_len ({max_len}) is longer than the model allows "
                f"({model.max_position_embeddings}); lower it or leave it out."
            )
        model.check_split(self.tp_size, self.pp_size, self.ep_size)
        if self.expert_map is not None:
            model = self._place_experts(self.expert_map, model)
        if self.max_total_tokens is not None:
            usable = self.max_total_tokens // self.page_size * self.page_size
            if self.max_total_tokens < 2 * self.page_size:
                raise ConfigError(
                    f"max_total_tokens ({self.max_total_tokens}) holds fewer than two pages of "
                    f"{self.page_size} tokens; raise it or lower page_size."
                )
            spare = self.draft_tokens
            if self.max_model_len is not None and usable < self.max_model_len + spare:
                drafts = f" and {spare} tokens of drafts (2 x (k + 1))" if spare else ""
                raise ConfigError(
                    f"max_total_tokens ({self.max_total_tokens}) can't hold one request of "
                    f"max_model_len ({self.max_model_len}) tokens{drafts}; raise it or lower "
                    "max_model_len."
                )
            max_len = min(max_len, usable - spare)
            if max_len < 2:
                raise ConfigError(
                    f"max_total_tokens ({self.max_total_tokens}) holds no request beside {spare} "
                    "tokens of drafts; raise it or lower num_speculative_tokens."
                )
        chunk = self.chunked_prefill_size
        if chunk > 0 and chunk < self.page_size:
            raise ConfigError(
                f"chunked_prefill_size ({chunk}) is smaller than page_size ({self.page_size}): "
                "a chunk must hold at least one page. Raise it, or set -1 to switch chunking off."
            )
        if self.enable_dynamic_chunking and chunk < 2 * self.page_size:
            raise ConfigError(
                f"enable_dynamic_chunking needs chunks that can shrink: set chunked_prefill_size "
                f"({chunk}) to at least two pages ({2 * self.page_size}), or switch it off."
            )
        if chunk <= 0 and self.max_prefill_tokens < max_len and self.max_model_len is not None:
            raise ConfigError(
                f"without chunked prefill, max_prefill_tokens ({self.max_prefill_tokens}) must "
                f"hold a prompt of max_model_len ({max_len}); raise it, lower max_model_len, or "
                "set chunked_prefill_size."
            )
        key = "attention_backend" if self.kernels == "auto" else "kernels"
        if getattr(self, key) != "auto":
            check_form(self.quantization, key, kernels_of(getattr(self, key)))
        if self.attention_backend == "flashinfer-fa3" and self.kv_cache_dtype != "auto":
            raise ConfigError(
                "attention_backend flashinfer-fa3 can't read a KV cache of another type than the "
                "model's; set kv_cache_dtype: auto or attention_backend: flashinfer."
            )
        if self.device != "auto":
            self.check_device(self.device)
        if self.enable_expert_metrics and (model.layout is None or not model.layout.mixtures):
            raise ConfigError(
                f"enable_expert_metrics counts tokens of a mixture's experts, and {model.title}, "
                "has none that can be counted; leave it out."
            )
        if self.enable_expert_metrics and self.device == "simulated":
            raise ConfigError(
                "enable_expert_metrics needs a device that computes experts, not device: "
                "simulated; leave it out."
            )
        if self.simulated != SimulatedDevice() and self.device != "simulated":
            raise ConfigError("simulated needs device: simulated; set it or leave simulated out.")
        if self.pp_max_micro_batch_size is not None and self.pp_size == 1:
            raise ConfigError("pp_max_micro_batch_size needs pp_size > 1; leave it out.")
        if self.pp_async_depth and not self.enable_overlap:
            raise ConfigError("pp_async_depth needs enable_overlap: true; set it to 0.")
        if self.pp_async_depth and self.pp_size == 1:
            raise ConfigError("pp_async_depth needs pp_size > 1; set it to 0.")
        if self.num_micro_batches > MAX_MICRO_BATCHES:
            raise ConfigError(
                f"pp_size + pp_async_depth ({self.num_micro_batches}) is above the "
                f"{MAX_MICRO_BATCHES} micro-batches that stages can hand on without waiting for "
                "each other; lower one of them."
            )
        if self.max_running_requests < self.num_micro_batches:
            raise ConfigError(
                f"max_running_requests ({self.max_running_requests}) must be at least the number "
                f"of micro-batches ({self.num_micro_batches} = pp_size + pp_async_depth)."
            )
        if self.enable_priority_preemption and self.schedule_policy != "priority":
            raise ConfigError(
                "enable_priority_preemption needs schedule_policy: priority; set it or switch "
                "preemption off."
            )
        if self.speculative_config is not None:
            if model.keeps_states:
                raise ConfigError(
                    f"{model.title}, keeps states of requests beside attention, which drafts can't "
                    "go back in; leave speculative_config out."
                )
            self._check_draft_model(self.speculative_config, model, max_len)
        self._check_adapters()
        pooling = read_pooling(model.path) if self.pooling == "auto" else self.pooling
        engine = self
        if model.keeps_states:  # where a cached prefix ends, no state was kept
            engine = self.model_copy(update={"enable_prefix_cache": False})
        return ResolvedConfig(engine, model, max_len, pooling)


@dataclass(frozen=True)
class ResolvedConfig:
    """An `EngineConfig` together with the model that it was checked against."""

    engine: EngineConfig
    model: ModelConfig
    max_model_len: int
    """Longest prompt + output, in tokens."""
    pooling: Pooling
    """How embeddings are made."""

    def here(self) -> ResolvedConfig:
        """The same on this machine: where the model's folder lies that another machine made of a
        GGUF file, or fetched. Raises `ConfigError` if it can't be had here."""
        if self.model.path.is_dir():
            return self
        folder = resolve_model_path(self.engine.model, self.engine.revision)
        return replace(self, model=replace(self.model, path=folder))


@dataclass(frozen=True)
class MachineConfig:
    """Base of what a role goes by: the resolved configuration, and what was decided of it on the
    role's machine."""

    resolved: ResolvedConfig

    @property
    def engine(self) -> EngineConfig:
        """The configuration's keys."""
        return self.resolved.engine

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return self.resolved.model

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.resolved.max_model_len


@dataclass(frozen=True)
class WorkerConfig(MachineConfig):
    """The same for all ranks of an engine. Sizes in tokens, requests and threads. No field of it is
    `auto`; those keys of `engine` that have a field here are not read from there."""

    dtype: str
    device: str
    num_kv_tokens: int | None
    """KV tokens, stated or estimated (CPU). None: measured once the weights are loaded (CUDA)."""
    max_kv_tokens: int
    """KV tokens of all requests at full length, in whole pages; more can never be used."""
    max_step_tokens: int
    """Tokens of the largest step that the scheduler may send."""
    kernels: KernelChoice
    cpu_threads: int
    cuda_graph_max_batch_size: int = 0
    """Largest decode batch that is captured; 0: none is."""
    short_step_s: float = 0.0
    """Steps on CPU that are estimated to take less run on one thread (`StepThreads`)."""

    def in_effect(self) -> EngineConfig:
        """The configuration's keys with what was decided of them for all ranks."""
        decided = {
            "device": self.device,
            "dtype": self.dtype,
            "cpu_threads": self.cpu_threads,
            "max_model_len": self.max_model_len,
        }
        return self.engine.model_copy(update=decided)

    @property
    def comm_backend(self) -> str:
        """torch.distributed's backend for this device."""
        return "nccl" if self.device == "cuda" else "gloo"


def load_config(kind: type[M], values: dict[str, Any]) -> M:
    """Build a config model, turning pydantic's errors into `ConfigError` sentences."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(" ".join(_explain(kind, e) for e in error.errors())) from error


def _explain(kind: type[BaseModel], error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] == "extra_forbidden":
        ours = OTHER_NAMES.get(key.replace("-", "_"))
        if ours is not None:
            return f"unknown key '{key}': {ours}"
        close = difflib.get_close_matches(key, list(kind.model_fields), n=1)
        hint = f"did you mean '{close[0]}'?" if close else "see docs/configuration.md."
        return f"unknown key '{key}': {hint}"
    return f"{key}: {error['msg']} (got {error['input']!r}); see docs/configuration.md."
