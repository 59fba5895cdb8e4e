"""The words that configuration keys accept, and the class that each word stands for.

All are listed here, so that `engine.config` can check them in processes that must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from engine.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps each word of a key to a class or a function, in the order given.

    An entry may be "module:name": it is imported when its word is looked up.
    """

    def __init__(
        self,
        key: str,
        entries: Mapping[str, T | str],
        error: Callable[[str], Exception] = ConfigError,
    ) -> None:
        """`error` makes the exception for an unknown word from its message."""
        self._key = key
        self._entries = dict(entries)
        self._error = error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, word: str) -> T:
        """What `word` stands for. Raises `error`, which lists the known words, for other words."""
        entry = self._entries.get(word)
        if entry is None:
            known = ", ".join(self._entries)
            raise self._error(f"{self._key} {word!r} is unknown; choose one of {known}.")
        if not isinstance(entry, str):
            return entry
        found: T = find(entry)
        return found


def find(place: str) -> Any:
    """What "module:name" names. Raises `ImportError` or `AttributeError`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


KERNELS: Registry[Any] = Registry(
    "kernels",
    {
        "cpu": "engine.layers.kernel_set:CPU",
        "torch": "engine.layers.kernel_set:TORCH",
        "flashinfer": "engine.layers.kernel_set:FLASHINFER",
    },
)
"""`KernelSet`s. Each has an attention backend of the same word, and the sampling backend
`sampling_of`."""

ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention_backend",
    {
        "cpu": "engine.attention.cpu_backend:CpuAttentionBackend",
        "torch": "engine.attention.torch_backend:make_torch_attention",
        "flashinfer": "engine.attention.flashinfer_backend:FlashInferAttentionBackend",
        "flashinfer-fa3": "engine.attention.flashinfer_backend:make_fa3_attention",
    },
)
"""Calls that take `AttentionInputs` and return an `AttentionBackend`."""
LATENT_BACKENDS = frozenset(("cpu", "torch"))
"""Those of them that attend to latents. For others these are expanded to keys and values."""

SAMPLING_BACKENDS: Registry[Any] = Registry(
    "sampling_backend",
    {
        "cpu": "engine.sampling.cpu_backend:CpuSampling",
        "torch": "engine.sampling.torch_backend:TorchSampling",
        "triton": "engine.sampling.triton_backend:TritonSampling",
    },
)
"""Calls that take a `DrawTable` and return a `SamplingBackend`."""


def kernels_of(backend: str) -> str:
    """The word of `KERNELS` that an attention or sampling backend belongs to: its own, before a
    hyphen."""
    return backend.partition("-")[0]


def sampling_of(kernels: str) -> str:
    """The word of `SAMPLING_BACKENDS` that goes with one of `KERNELS`: the same, but Manta's own
    beside FlashInfer's."""
    return "triton" if kernels == "flashinfer" else kernels


WEIGHT_FORMATS: Registry[Any] = Registry(
    "quantization",
    {
        "int8": "engine.checkpoint.weight_formats:INT8",
        "int4": "engine.checkpoint.weight_formats:INT4",
    },
)
"""`WeightForm`s that are not the model's own type."""

_QUANTIZED = "engine.checkpoint.quantized"
CHECKPOINT_FORMATS: Registry[Any] = Registry(
    "quant_method",
    {
        "awq": f"{_QUANTIZED}.gptq:Awq",
        "bitsandbytes": f"{_QUANTIZED}.bitsandbytes:BitsAndBytes",
        "compressed-tensors": f"{_QUANTIZED}.compressed_tensors:CompressedTensors",
        "fbgemm-fp8": f"{_QUANTIZED}.scaled:Fbgemm",
        "finegrained-fp8": f"{_QUANTIZED}.scaled:Fp8",
        "fp8": f"{_QUANTIZED}.scaled:Fp8",
        "gptq": f"{_QUANTIZED}.gptq:Gptq",
        "modelopt": f"{_QUANTIZED}.modelopt:ModelOpt",
        "mxfp4": f"{_QUANTIZED}.float4:Mxfp4",
    },
)
"""Subclasses of `CheckpointFormat` by the `quant_method` of config.json, with hyphens."""

MATRIX_READERS: Registry[Any] = Registry(
    "reader",
    {
        "scaled": "engine.layers.quantized.scaled:ScaledReader",
        "packed": "engine.layers.quantized.packed:make_packed_reader",
        "float4": "engine.layers.quantized.float4:Float4Reader",
        "codebook": "engine.layers.quantized.codebook:CodebookReader",
    },
)
"""Calls that take a `StoredMatrix` of this reader and `Boxes`, and return a `MatrixReader`."""

SCHEDULE_POLICIES: Registry[Any] = Registry(
    "schedule_policy",
    {
        "lpm": "engine.scheduler.schedule_policy:LPM",
        "fcfs": "engine.scheduler.schedule_policy:FCFS",
        "priority": "engine.scheduler.schedule_policy:Priority",
    },
)
"""Subclasses of `SchedulePolicy`."""

EVICTION_POLICIES: Registry[Any] = Registry(
    "eviction_policy",
    {
        "lru": "engine.kvcache.eviction:LRUPolicy",
        "lfu": "engine.kvcache.eviction:LFUPolicy",
        "fifo": "engine.kvcache.eviction:FIFOPolicy",
        "priority": "engine.kvcache.eviction:PriorityPolicy",
    },
    ValueError,
)
"""Subclasses of `EvictionPolicy`."""

DRAFTERS: Registry[Any] = Registry(
    "speculative_config.method",
    {
        "ngram": "engine.speculative.ngram:NgramDrafter",
        "suffix": "engine.speculative.suffix:SuffixDrafter",
        "draft_model": "engine.worker.draft_model:DraftModelDrafter",
    },
)
"""Calls that take a `SpeculativeConfig` and return a `Drafter`."""

TRANSFORMERS = "transformers"
"""The word for a decoder that transformers' code computes."""
TRANSFORMERS_GATHERED = "transformers-gathered"
"""The same for one whose attention is its own code."""
TRANSFORMERS_ROWS = "transformers-rows"
"""The same if its layers keep states of requests beside keys and values."""
# One decoder with switches in `ModelConfig`: biases, norms of q and k, sliding windows.
_LLAMA = "engine.models.llama:LlamaModel"

MODELS: Registry[Any] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
        TRANSFORMERS: "engine.models.transformers_model:TransformersModel",
        TRANSFORMERS_GATHERED: "engine.models.gathered:GatheredModel",
        TRANSFORMERS_ROWS: "engine.models.row_model:RowModel",
    },
)
"""Models by their name in config.json."""
