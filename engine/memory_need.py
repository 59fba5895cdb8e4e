"""What an engine takes of memory, calculated from the shapes in config.json, and if it is there.

The one judgement of `manta check`, of `manta serve` before Ray starts, of `engine.LLM` and of the
workers: they differ only in how much of it they know. It loads no torch. On CUDA the KV cache is
measured (`engine.worker.sizing.kv_sizing`), so only the weights are judged here.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.layout import rank_calls
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_formats import PLAIN, WeightForm, weight_form
from engine.config import EngineConfig, ResolvedConfig
from engine.errors import ConfigError

GIB = 1 << 30
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by the words of `dtype`."""
CPU_MAX_BYTES = 4 << 30
"""Bytes of KV cache that one CPU worker takes unless `max_total_tokens` says otherwise: the host's
memory is shared with everything else on it."""
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
) -> int:
    """Bytes of one rank's matrices on stage `pp_rank` (norms and biases don't matter here), whose
    plain numbers have `item` bytes. `ep_size` as in the configuration."""
    if model.layout is not None:
        layers = model.stage_layers(pp_size)[pp_rank]
        return PLAIN.matrix_bytes(1, model.layout.rank_parameters(tp_size, layers, ep_size), item)
    layer = sum(form.matrix_bytes(*shape, item) for shape in model.layer_matrices(tp_size))
    num_bytes = len(model.stage_layers(pp_size)[pp_rank]) * layer
    rows, hidden = -(-model.vocab_size // tp_size), model.hidden_size
    is_first, is_last = pp_rank == 0, pp_rank == pp_size - 1
    if is_first:  # the table of embeddings keeps its type
        num_bytes += PLAIN.matrix_bytes(rows, hidden, item)
    if is_last and not (is_first and model.tie_word_embeddings and not form.has_own_head):
        num_bytes += form.matrix_bytes(rows, hidden, item)
    return num_bytes


def cache_bytes_per_token(model: ModelConfig, item: int, tp_size: int = 1, pp_size: int = 1) -> int:
    """Bytes of one token's keys and values, of `item` bytes each, on the rank with most layers."""
    stages = (rank_calls(model.calls, tp_size, layers) for layers in model.stage_layers(pp_size))
    return item * max(sum(call.kv_size for call in stage) for stage in stages)


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
    ep_size: int | None = None
    """As in the configuration."""

    @classmethod
    def of(cls, config: ResolvedConfig, dtype: str, attention_backend: str) -> MemoryNeed:
        """`dtype` and `attention_backend`: what `auto` has become."""
        engine, drafts = config.engine, config.engine.speculative_config
        return cls(
            model=config.model,
            draft=draft_of(drafts.model if drafts is not None else None),
            dtype=dtype,
            kv_cache_dtype=engine.kv_cache_dtype,
            tp_size=engine.tp_size,
            pp_size=engine.pp_size,
            form=weight_form(engine.quantization),
            num_rows=engine.max_running_requests + 1,
            has_copies=attention_backend == "torch",
            ep_size=engine.ep_size,
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

    def per_token(self) -> int:
        """What a token takes in the KV cache, on the rank that has most layers."""
        item = 1 if self.kv_cache_dtype == "fp8_e4m3" else TYPE_BYTES[self.dtype]
        num_bytes = cache_bytes_per_token(self.model, item, self.tp_size, self.pp_size)
        if self.has_copies:
            num_bytes += cache_bytes_per_token(self.model, 4, self.tp_size, self.pp_size)
        if self.draft is not None:
            num_bytes += cache_bytes_per_token(self.draft, item)
        return num_bytes

    def stated(self, max_total_tokens: int | None) -> int:
        """Weights and states of all ranks, and their KV cache if its size is stated."""
        rank = self.states() + self.per_token() * (max_total_tokens or 0)
        return self.weights() + self.num_ranks * rank

    def _stages(self) -> list[int]:
        """Weights of a rank of each stage."""
        item, form = TYPE_BYTES[self.dtype], self.form
        drafts = 0 if self.draft is None else stage_bytes(self.draft, item, 1, 1, 0, form)
        split, groups = (self.tp_size, self.pp_size), self.ep_size
        return [
            drafts + stage_bytes(self.model, item, *split, stage, form, groups)
            for stage in range(self.pp_size)
        ]


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
    if budget < max(per_token, 1):
        rows = f" lower max_running_requests ({need.num_rows - 1})," if need.states() else ""
        raise ConfigError(
            f"no room for a KV cache: {budget} bytes are free on cpu and one token takes "
            f"{per_token}. Free memory,{rows} raise tp_size or pp_size, or use a smaller model."
        )
    return budget // max(per_token, 1)


def max_cache_tokens(engine: EngineConfig, max_model_len: int) -> int:
    """KV tokens of all requests at full length, in whole pages; more can never be used."""
    pages = -(-(max_model_len + engine.draft_tokens) // engine.page_size)
    return engine.max_running_requests * pages * engine.page_size


def shortage(needed: int, free: int) -> str:
    """What to tell where an engine needs `needed` bytes of a host that has `free`."""
    return (
        f"this needs about {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free. "
        "Lower max_total_tokens or num_replicas, set a smaller dtype or model, or end other "
        "programs."
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
    cache = need.per_token() * tokens
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
