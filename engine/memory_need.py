"""What an engine takes of memory, calculated from the shapes in config.json, and if it is there.

The one judgement of `manta check`, of `manta serve` before Ray starts, of `engine.LLM` and of the
workers: they differ only in how much of it they know. It loads no torch. On CUDA the KV cache is
measured (`engine.worker.sizing.kv_sizing`), so only the weights are judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.adapter import PeftAdapter
from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.kept import KeptShare, QuantizedFiles
from engine.checkpoint.layout import AttentionCall, rank_calls, sees_windows
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import PLAIN, WeightForm, weight_form
from engine.config import EngineConfig, KernelChoice, ResolvedConfig
from engine.errors import ConfigError

GIB = 1 << 30
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by the words of `dtype`."""
CPU_MAX_BYTES = 4 << 30
"""Bytes of KV cache that one CPU worker takes unless `max_total_tokens` says otherwise: the host's
memory is shared with everything else on it."""
MIN_SWA_RATIO = 0.125
"""Least tokens of layers with windows for each of the KV cache where `swa_full_tokens_ratio` is
auto."""
USUAL_TOKENS = 4096
"""Otherwise there are as many as requests of this length need."""
MAX_CACHE_TOKENS = 2**30
GRAPH_RESERVE_BYTES = 2 * GIB
"""Of a GPU: kept free for the CUDA graphs, which are captured after the KV cache is allocated."""
HEADROOM_BYTES = 1 * GIB
"""Of a GPU: kept free for what the profile doesn't see: fragmentation, growth of the penalties'
pool, modules that CUDA loads at their first use."""


def stage_bytes(
    model: ModelConfig,
    item: int,
    tp_size: int,
    pp_size: int,
    pp_rank: int,
    form: WeightForm = PLAIN,
    ep_size: int | None = None,
    files: QuantizedFiles | None = None,
) -> int:
    """Bytes of one rank's matrices on stage `pp_rank` (norms and biases don't matter here), whose
    plain numbers have `item` bytes. `ep_size` as in the configuration. `files`: the checkpoint
    whose quantized matrices our CPU kernels multiply by as they are; None: all become plain."""
    saved = 0
    if files is not None:
        saved = KeptShare(model, files, item, form, ep_size).saved(tp_size, pp_size, pp_rank)
    if model.layout is not None:
        layers = model.stage_layers(pp_size)[pp_rank]
        numbers = model.layout.rank_parameters(tp_size, layers, ep_size)
        return PLAIN.matrix_bytes(1, numbers, item) - saved
    layer = sum(form.matrix_bytes(*shape, item) for shape in model.layer_matrices(tp_size))
    num_bytes = len(model.stage_layers(pp_size)[pp_rank]) * layer
    rows, hidden = -(-model.vocab_size // tp_size), model.hidden_size
    is_first, is_last = pp_rank == 0, pp_rank == pp_size - 1
    if is_first:  # the table of embeddings keeps its type
        num_bytes += PLAIN.matrix_bytes(rows, hidden, item)
    if is_last and not (is_first and model.tie_word_embeddings and not form.has_own_head):
        num_bytes += form.matrix_bytes(rows, hidden, item)
    return num_bytes - saved


def kept_files(
    engine: EngineConfig, model: ModelConfig, kernels: str, device: str
) -> QuantizedFiles | None:
    """The checkpoint of `model`, if quantized matrices of it stay as they are because the `kernels`
    of the CPU multiply by them. Raises `ConfigError` if files are missing or damaged."""
    reads = engine.load_format == "auto" and device == "cpu"
    return QuantizedFiles.of(model) if reads and kernels == "cpu" else None


def gpu_share(engine: EngineConfig, model: ModelConfig, dtype: str, device: str) -> float:
    """The bytes of a checkpoint's files beside those of plain matrices of `dtype`, where a GPU
    keeps what is quantized: weights take so much at least, since not all forms have kernels. 1:
    nothing stays quantized. Raises `ConfigError` if files are missing or damaged."""
    keeps = engine.load_format == "auto" and engine.quantization == "auto"
    if device != "cuda" or not keeps or TYPE_BYTES[dtype] != TYPE_BYTES["bfloat16"]:
        return 1.0
    files = QuantizedFiles.of(model)
    if files is None:
        return 1.0
    return min(1.0, files.num_bytes / stage_bytes(model, TYPE_BYTES[dtype], 1, 1, 0))


@dataclass(frozen=True)
class WindowNeed:
    """How many tokens the layers with windows have room for. All sizes in tokens."""

    reach: int
    """That a query of one of these layers sees at most."""
    page_size: int
    per_request: int
    """That a running request may hold there between steps."""
    per_step: int
    """That the largest step computes; it holds them beside those of the requests."""
    ratio: float

    @classmethod
    def of(cls, config: ResolvedConfig) -> WindowNeed | None:
        """None: all layers have room for the same tokens."""
        engine, model = config.engine, config.model
        calls = model.calls
        near = sees_windows(calls)
        is_flat = model.layout is None or model.layout.mode == "flat"
        if not is_flat or not any(near):
            return None
        reach = max(call.reach or 0 for call, sees in zip(calls, near, strict=True) if sees)
        spare = engine.draft_tokens + 1 + 2 * engine.page_size
        if reach + spare >= config.max_model_len:
            return None
        stated = engine.swa_full_tokens_ratio
        per_request = -(-(reach + spare) // engine.page_size) * engine.page_size
        if stated == "auto":
            keeps_all = all(near) and engine.max_total_tokens is not None
            usual = min(USUAL_TOKENS, config.max_model_len)
            ratio = 1.0 if keeps_all else max(per_request / usual, MIN_SWA_RATIO)
        else:
            ratio = stated
        if ratio >= 1.0:
            return None
        return cls(
            reach=reach,
            page_size=engine.page_size,
            per_request=per_request,
            per_step=(-(-max_step_tokens(engine, config.max_model_len) // engine.page_size) + 1)
            * engine.page_size,
            ratio=ratio,
        )

    def tokens(self, num_tokens: int) -> int:
        """Those of the layers with windows where the others have room for `num_tokens`."""
        least = self.per_request + self.per_step
        found = min(max(int(num_tokens * self.ratio), least), num_tokens)
        return found // self.page_size * self.page_size

    def slots(self, num_tokens: int) -> int | None:
        """The same; None if that isn't fewer than the other layers have."""
        found = self.tokens(num_tokens)
        return found if found + self.page_size <= num_tokens else None


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a KV cache by its tokens, on the rank that needs most."""

    stages: tuple[tuple[int, int], ...]
    """Of each stage: bytes of a token in its layers that keep all, and in those with windows."""
    window: WindowNeed | None = None

    @classmethod
    def of(
        cls,
        stages: Iterable[Sequence[AttentionCall]],
        item: int,
        window: WindowNeed | None = None,
    ) -> CacheSize:
        """Of the calls of each stage, with keys and values of `item` bytes each."""
        sizes = [_kv_sizes(calls) for calls in stages]
        return cls(tuple((item * whole, item * within) for whole, within in sizes), window)

    @property
    def per_token(self) -> int:
        """Bytes of a token in all layers."""
        return max(map(sum, self.stages))

    def num_bytes(self, num_tokens: int) -> int:
        """Of a cache of `num_tokens`."""
        near = num_tokens if self.window is None else self.window.tokens(num_tokens)
        return max(num_tokens * whole + near * within for whole, within in self.stages)

    def tokens_in(self, num_bytes: int) -> int:
        """The most tokens whose cache takes no more than `num_bytes`, at least 0."""
        if self.window is None:
            return max(0, num_bytes) // max(self.per_token, 1)
        low, high = 0, MAX_CACHE_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_bytes(middle) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def plus(self, num_bytes: int) -> CacheSize:
        """With so many bytes more for each token."""
        stages = tuple((whole + num_bytes, within) for whole, within in self.stages)
        return CacheSize(stages, self.window)


def cache_size(
    model: ModelConfig,
    item: int,
    tp_size: int = 1,
    pp_size: int = 1,
    window: WindowNeed | None = None,
) -> CacheSize:
    """Of keys and values of `item` bytes each."""
    stages = (rank_calls(model.calls, tp_size, layers) for layers in model.stage_layers(pp_size))
    return CacheSize.of(stages, item, window)


def _kv_sizes(calls: Sequence[AttentionCall]) -> tuple[int, int]:
    """Numbers that a token takes in the calls that keep all tokens, and in those with windows."""
    near = sees_windows(calls)
    sizes = [0, 0]
    for call, sees in zip(calls, near, strict=True):
        sizes[sees] += call.kv_size
    return sizes[0], sizes[1]


def cache_bytes_per_token(model: ModelConfig, item: int, tp_size: int = 1, pp_size: int = 1) -> int:
    """Bytes of one token's keys and values, of `item` bytes each, on the rank with most layers."""
    return cache_size(model, item, tp_size, pp_size).per_token


@dataclass(frozen=True)
class MemoryNeed:
    """What the ranks of one engine take. Sizes in bytes."""

    model: ModelConfig
    draft: ModelConfig | None
    """The draft model, which every rank has whole."""
    dtype: str
    kv_cache_dtype: str
    tp_size: int
    pp_size: int
    form: WeightForm = PLAIN
    num_rows: int = 0
    """Requests whose states beside keys and values have room, if the model keeps any."""
    has_copies: bool = False
    """Whether decoding keeps float32 copies of keys and values (the backend `torch` on CPU)."""
    window: WindowNeed | None = None
    ep_size: int | None = None
    """As in the configuration."""
    files: QuantizedFiles | None = None
    """The checkpoint, if its quantized matrices stay as they are where that can be."""
    draft_files: QuantizedFiles | None = None
    """The same of the draft model."""
    gpu_share: float = 1.0
    """What weights take at least, beside plain ones, where a GPU keeps some quantized."""
    adapters: int = 0
    """Of the host, by all ranks together: the LoRA adapters that it holds at once, as far as they
    are known."""

    @classmethod
    def of(
        cls, config: ResolvedConfig, dtype: str, kernels: KernelChoice, device: str = "cpu"
    ) -> MemoryNeed:
        """`dtype` and `kernels`: what `auto` has become. Raises `ConfigError` if files of a
        quantized checkpoint are missing or damaged."""
        engine, drafts = config.engine, config.engine.speculative_config
        attention_backend = kernels.attention
        model = config.model.for_backend(attention_backend)
        draft = draft_of(drafts.model if drafts is not None else None)
        drafts_from = None
        if draft is not None:
            drafts_from = kept_files(engine, draft, kernels.layers, device)
        return cls(
            model=model,
            draft=draft,
            dtype=dtype,
            kv_cache_dtype=engine.kv_cache_dtype,
            tp_size=engine.tp_size,
            pp_size=engine.pp_size,
            form=weight_form(engine.quantization),
            num_rows=engine.max_running_requests + 1,
            has_copies=attention_backend == "torch",
            window=WindowNeed.of(config),
            ep_size=engine.ep_size,
            files=kept_files(engine, model, kernels.layers, device),
            draft_files=drafts_from,
            gpu_share=gpu_share(engine, model, dtype, device),
            adapters=held_adapters(engine, TYPE_BYTES[dtype]) if device == "cpu" else 0,
        )

    @property
    def num_ranks(self) -> int:
        """Workers of the engine."""
        return self.tp_size * self.pp_size

    def rank_weights(self) -> int:
        """Weights of the rank that has most of them."""
        return max(self._stages())

    def weights(self) -> int:
        """Weights of all ranks."""
        return self.tp_size * sum(self._stages())

    def states(self) -> int:
        """What requests keep on a rank beside keys and values, however many run."""
        return self.num_rows * self.model.state_bytes(TYPE_BYTES[self.dtype])

    def cache(self) -> CacheSize:
        """The KV cache of the rank that needs most."""
        item = 1 if self.kv_cache_dtype == "fp8_e4m3" else TYPE_BYTES[self.dtype]
        drafts = 0 if self.draft is None else cache_bytes_per_token(self.draft, item)
        if self.has_copies:
            item += 4
        return cache_size(self.model, item, self.tp_size, self.pp_size, self.window).plus(drafts)

    def per_token(self) -> int:
        """What a token takes in all layers of the KV cache, on the rank that has most of them."""
        return self.cache().per_token

    def stated(self, max_total_tokens: int | None) -> int:
        """Weights, adapters and states of all ranks, and their KV cache if its size is stated."""
        rank = self.states() + self.cache().num_bytes(max_total_tokens or 0)
        return self.weights() + self.adapters + self.num_ranks * rank

    def _stages(self) -> list[int]:
        """Weights of a rank of each stage."""
        item, form = TYPE_BYTES[self.dtype], self.form
        drafts = 0
        if self.draft is not None:
            drafts = stage_bytes(self.draft, item, 1, 1, 0, form, files=self.draft_files)
        split, groups = (self.tp_size, self.pp_size), self.ep_size
        return [
            drafts + int(self.gpu_share * size)
            for stage in range(self.pp_size)
            for size in [stage_bytes(self.model, item, *split, stage, form, groups, self.files)]
        ]


def quantized_line(need: MemoryNeed) -> str:
    """What becomes of a checkpoint's quantized matrices and how much memory that takes, for who
    serves it; "" if the checkpoint is plain. Raises `ConfigError` if it has no weights."""
    files = need.files or QuantizedFiles.of(need.model)
    if files is None:
        return ""
    becomes = f"dequantized at load to {need.dtype}"
    if need.form is not PLAIN:
        becomes = "dequantized at load and kept as `quantization` says"
    kept, split = 0, (need.tp_size, need.pp_size)
    if need.files is not None:
        share = KeptShare(need.model, files, TYPE_BYTES[need.dtype], need.form, need.ep_size)
        stages = range(need.pp_size)
        kept = need.tp_size * sum(share.num_bytes(*split, stage) for stage in stages)
        if share.keeps_all(*split):
            return "; ".join(
                (f"{files.title}, kept as it is: {_gib(need.weights())}", *files.notes)
            )
    if need.gpu_share < 1:
        plain = replace(need, gpu_share=1.0).weights()
        said = (
            f"{files.title}, kept so where our kernels have the form, otherwise {becomes}: at most "
            f"{_gib(plain)}, {_gib(files.num_bytes)} in the files"
        )
        return "; ".join((said, *files.notes))
    sizes = f"{_gib(need.weights())} instead of {_gib(files.num_bytes)}"
    if kept:
        said = f"{files.title}, {_gib(kept)} kept as it is, the rest {becomes}: {sizes}"
    else:
        said = f"{files.title}, {becomes}: {sizes}"
    return "; ".join((said, *files.notes))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.{1 if num_bytes >= GIB else 2}f} GiB"


def draft_of(model: str | None) -> ModelConfig | None:
    """The shape of a draft model. Raises `ConfigError` if it can't be read."""
    return None if model is None else ModelConfig.from_pretrained(resolve_model_path(model))


def host_cache_tokens(need: MemoryNeed, free: int, fraction: float, engines: int = 1) -> int:
    """KV tokens of an engine on CPU whose `max_total_tokens` isn't stated.

    `fraction` of what the weights leave of the host's `free` bytes is divided over the workers of
    its `engines`, at most `CPU_MAX_BYTES` each. Raises `ConfigError` if not one token fits.
    """
    taken = need.stated(None)
    left = free - engines * taken
    if left <= 0:  # those of the other engines may be loaded already
        left = max(0, free - taken)
    budget = min(int(left * (fraction / engines)) // need.num_ranks, CPU_MAX_BYTES)
    per_token = need.per_token()
    tokens = need.cache().tokens_in(budget)
    if tokens == 0:
        rows = f" lower max_running_requests ({need.num_rows - 1})," if need.states() else ""
        raise ConfigError(
            f"no room for a KV cache: {budget} bytes are free on cpu and one token takes "
            f"{per_token}. Free memory,{rows} raise tp_size or pp_size, or use a smaller model."
        )
    return tokens


def max_cache_tokens(engine: EngineConfig, max_model_len: int) -> int:
    """KV tokens of all requests at full length, in whole pages; more can never be used."""
    pages = -(-(max_model_len + engine.draft_tokens) // engine.page_size)
    return engine.max_running_requests * pages * engine.page_size


def max_step_tokens(engine: EngineConfig, max_model_len: int) -> int:
    """Tokens of the largest step that the scheduler may send.

    That is a full chunk, or one page of a prompt together with a decode of every request (and
    its drafts). Without chunking it is a long prompt, which runs alone.
    """
    chunk, rows = engine.chunked_prefill_size, engine.max_running_requests
    if engine.speculative_config is not None:
        rows *= engine.speculative_config.num_speculative_tokens + 1
    budget = chunk if chunk > 0 else max(engine.max_prefill_tokens, max_model_len + rows)
    return max(budget, rows + engine.page_size)


def held_adapters(engine: EngineConfig, item: int) -> int:
    """Bytes of the LoRA adapters that an engine holds at once, with `item` for each number: of the
    largest that are listed. If `max_cpu_loras` asks for more, those to come count as the largest of
    them. Raises `ConfigError`."""
    listed = [PeftAdapter.open(Path(folder)) for folder in engine.lora_adapters.values()]
    sizes = sorted((item * adapter.num_values for adapter in listed), reverse=True)
    del sizes[engine.max_held_loras :]
    if sizes and engine.max_cpu_loras is not None and engine.takes_more_adapters:
        sizes += [sizes[0]] * (engine.max_cpu_loras - len(sizes))
    return sum(sizes)


def shortage(needed: int, free: int, adapters: int = 0) -> str:
    """What to tell where an engine needs `needed` bytes of a host that has `free`. `adapters`: what
    of that is for adapters."""
    first = ""
    if adapters >= GIB // 20:
        first = f"{adapters / GIB:.1f} GiB of that are for adapters: lower max_cpu_loras. "
    return (
        f"this needs about {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free. "
        f"{first}Lower max_total_tokens or num_replicas, set a smaller dtype or model, or end "
        "other programs."
    )


def gpu_weights_shortage(
    needed: int, total: int, free: int, fraction: float, remedies: list[str]
) -> str:
    """What to tell where a rank's weights need more than its GPU has free or `fraction` of it
    (`memory_fraction`); "" if they fit."""
    if needed <= min(free, int(fraction * total)):
        return ""
    which = f"only {free / GIB:.2f} GiB are free"
    if free > fraction * total:
        which = f"only {fraction * total / GIB:.2f} GiB may be used (memory_fraction {fraction:g})"
    return (
        f"this rank's weights take {needed / GIB:.2f} GiB, but of the GPU's {total / GIB:.2f} GiB "
        f"{which}. Change one of: {'; '.join(remedies)}."
    )


def gpu_cache_shortage(need: MemoryNeed, total: int, engine: EngineConfig, tokens: int) -> str:
    """The same for the KV cache of `tokens` beside the weights and the reserves; "" if it fits, as
    far as can be known before the largest steps have run."""
    reserve = HEADROOM_BYTES + (GRAPH_RESERVE_BYTES if engine.enable_cuda_graphs else 0)
    cache = need.cache().num_bytes(tokens)
    limit = int(engine.memory_fraction * total)
    if need.rank_weights() + need.states() + reserve + cache <= limit:
        return ""
    key = "max_model_len" if engine.max_total_tokens is None else "max_total_tokens"
    remedies = [f"lower {key}", "raise memory_fraction"]
    if need.kv_cache_dtype == "auto":
        remedies.append("set kv_cache_dtype: fp8_e4m3")
    remedies += split_remedies(need.dtype, need.tp_size, need.pp_size)
    states = ""
    if need.states():
        remedies.insert(0, f"lower max_running_requests (now {engine.max_running_requests})")
        states = f"the states of requests {need.states() / GIB:.2f} GiB, "
    return (
        f"of a GPU's {total / GIB:.2f} GiB {limit / GIB:.2f} GiB may be used (memory_fraction "
        f"{engine.memory_fraction:g}); the weights take {need.rank_weights() / GIB:.2f} GiB, "
        f"{states}CUDA graphs and headroom {reserve / GIB:.2f} GiB, and the KV cache of {key} "
        f"({tokens}) {cache / GIB:.2f} GiB. Change one of: {'; '.join(remedies)}."
    )


def split_remedies(dtype: str, tp_size: int, pp_size: int) -> list[str]:
    """Keys that make a rank's weights smaller, with their values now."""
    found = [
        f"raise tp_size (now {tp_size}) or pp_size (now {pp_size})",
        "use a smaller model or a larger GPU",
    ]
    if dtype == "float32":
        found.insert(0, "set dtype: bfloat16 (now float32)")
    return found


def crowding(workers: int, cores: int) -> str:
    """What to tell where `workers` compute on `cores`; "" if each can have one."""
    if workers <= cores:
        return ""
    return (
        f"{workers} workers (tp_size x pp_size x num_replicas) share {cores} CPU core"
        f"{'s' if cores > 1 else ''}: they take turns, and each step waits for the last of them. "
        "Lower tp_size, pp_size or num_replicas"
    )
