"""`TransformersModel`: any decoder of transformers, over Manta's pages, batches and kernels.

The model's own code runs on the tokens of a whole step at once, [1, T], prompts' chunks and decodes
mixed; only attention knows which request a token belongs to. Its linears are multiplied by our
kernels, those of one input as one product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.base import AttentionBackend, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.model_config import ModelConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.adapted import AdaptedLinears, Projection
from engine.layers.embedding_table import PackedTable
from engine.layers.expert_counts import ExpertCounts
from engine.layers.experts import Experts, is_experts
from engine.layers.fused_ops import FusedOps
from engine.layers.grouped_experts import GroupedExperts
from engine.layers.rotary import Angles
from engine.layers.weight_format import QuantizedFormat, WeightFormat
from engine.layers.weights import CheckpointSource, DummySource, WeightSource
from engine.models.cuts import own_heads
from engine.models.expert_projections import expert_projections, expert_sizes
from engine.models.interfaces import point_at
from engine.models.latents import latents_of, load_latents
from engine.models.lazy_weights import LazyWeights
from engine.models.linears import Linear, Product
from engine.models.parts import Chain, TiedEmbedding
from engine.models.recorded_decodes import RecordedDecodes
from engine.models.rotations import fix_rotations
from engine.models.row_cache import cache_argument
from engine.models.share import Share, replace_module
from engine.models.takeover import Takeover

_NAME = "manta"
_CAUSAL: Any = AutoModelForCausalLM
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that read one input."""
_ADAPTED = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
     "gate_up_proj", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "out_proj",
     "fc1", "fc2", "c_attn", "c_fc", "c_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
)  # fmt: skip
"""Linears of layers that adapters may change."""


@dataclass
class _Step:
    """The step that a model computes; its modules find it as their attribute `manta_step`."""

    layers: tuple[AttentionLayer, ...]
    parallel: ParallelState
    fused: FusedOps | None = None
    backend: AttentionBackend | None = None
    """None: attention looks at no other token (`_of_each_token`)."""
    batch: ForwardBatch | None = None
    calls: int = 0
    """Attention calls of this forward so far."""
    hidden: Tensor | None = None
    """[1, T, hidden] between stages: received from the one before, then what is to be sent."""
    sampled: Tensor | None = None
    sinks: dict[int, Tensor | None] = field(default_factory=dict)
    """Those of each call, seen while there is no backend."""
    _angles: list[tuple[Tensor, Angles]] = field(default_factory=list)

    def begin(self, hidden: Tensor | None = None) -> None:
        """A forward is next, behind the `hidden` [T, hidden] of an earlier stage."""
        self.calls = 0
        self._angles.clear()
        # A copy: layers may write to it.
        self.hidden = None if hidden is None else hidden[None].clone()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """See `engine.models.parts.Step`."""
        number = self.calls
        self.calls += 1
        backend, batch = self.backend, self.batch
        if batch is not None and batch.mark is not None:
            batch.mark()
        if angles is not None:
            if rows is None and backend is not None and batch is not None and backend.rotates:
                return backend.forward_rotating(q, k, v, angles, self.layers[number], batch)
            assert self.fused is not None
            self.fused.rotate_(angles[0], q, k, angles[1])
        if backend is None or batch is None:
            out = _of_each_token(q, k, v)
            return out if rows is None else out.index_select(0, rows)
        if rows is None:
            return backend.forward(q, k, v, self.layers[number], batch)
        return backend.forward_sampled(q.index_select(0, rows), k, v, self.layers[number], batch)

    def is_real(self, num_tokens: int) -> Tensor | None:
        """bool [num_tokens]: those that don't only fill up a captured decode, whose row is 0; None:
        all of them."""
        batch = self.batch
        if batch is None or not batch.batch_size == batch.num_tokens == num_tokens:
            return None
        return batch.req_pool_indices > 0

    def angles(self, cos: Tensor, sin: Tensor) -> Angles:
        """See `engine.models.parts.Step`."""
        for known, found in self._angles:
            if known is cos:
                return found
        half = cos.shape[-1] // 2
        table = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float()
        found = torch.arange(len(table), device=table.device), table
        self._angles.append((cos, found))
        return found


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What layers call: `q` [n, heads, L, dim], `k` and `v` [n, kv heads, L, dim] of n * L tokens;
    n is 1 unless layers have states (`RowModel`)."""
    step: _Step = module.manta_step  # type: ignore[assignment]
    call, parallel = step.layers[step.calls].call, step.parallel
    ranks = parallel.tp_size, parallel.tp_rank
    sinks = kwargs.get("s_aux")
    if step.backend is None and sinks is not None:
        step.sinks[step.calls] = own_heads(sinks.reshape(1, -1), call.num_heads, *ranks)[0]
    q = own_heads(q, call.num_heads, *ranks)
    k, v = (own_heads(x, call.num_kv_heads, *ranks) for x in (k, v))
    queries, keys, values = (_by_token(x) for x in (q, k, v))
    latents = latents_of(module)
    if latents is not None:
        queries = latents.queries(queries)
    out = step.attend(queries, keys, values, None)
    if latents is not None:
        out = latents.results(out.view(*queries.shape[:2], -1))
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], -1), None


def _of_each_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q and k [T, heads, dim], v [T, heads, v_dim] -> [T, heads * v_dim]: something of a token's
    own query, key and value, as they are rotated."""
    copies = q.shape[1] // k.shape[1]
    by = torch.arange(q.shape[2], device=q.device).mul(1.7).cos().to(q.dtype) / q.shape[2] ** 0.5
    turned = torch.sin(q @ by + (k @ by.flip(0)).repeat_interleave(copies, 1))
    return (v.repeat_interleave(copies, 1) + turned.unsqueeze(-1)).flatten(1)


def _by_token(x: Tensor) -> Tensor:
    """[n * L, heads, dim] of [n, heads, L, dim]; the heads of a token lie one behind the other."""
    x = x.transpose(1, 2).flatten(0, 1)
    lies_so = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if lies_so else x.clone(memory_format=torch.contiguous_format)


def _experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What a mixture of experts calls."""
    experts: Experts | GroupedExperts = module.manta_experts  # type: ignore[assignment]
    if experts.counts is not None:
        step: _Step = module.manta_step  # type: ignore[assignment]
        experts.counts.add(chosen, step.is_real(len(chosen)))
    return experts(hidden, chosen, weights)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)


class _Positions(Cache):
    """What a model takes for its cache. Attention has the keys; this knows where tokens stand."""

    def __init__(self, positions: Tensor) -> None:
        """`positions`: int64 [T], of the tokens of a step."""
        super().__init__(layers=[])
        self._positions = positions

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """What code adds to 0, 1, 2 ... for the positions."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@dataclass
class _Decoder:
    """The module before the head."""

    module: Any
    takes_positions: bool
    has_cache: bool
    """Whether it is given a cache of no keys: some ask that for positions, whatever they are
    told."""
    cache_name: str
    """Of the argument."""
    output: Any = None
    """Class of its outputs; known once it has been tried."""
    first_position: int = 0
    """What it calls the first one."""

    def given(self, ids: Tensor, positions: Tensor, cache: Cache | None = None) -> dict[str, Any]:
        """Its arguments for tokens `ids` [n, L] at `positions` [n, L]. Without a `cache` of theirs
        n must be 1."""
        if cache is None and self.has_cache:
            cache = _Positions(positions[0])
        given: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
        if self.takes_positions:
            given["position_ids"] = positions + self.first_position
        if cache is not None:
            given[self.cache_name] = cache
        return given


class TransformersModel:
    """A `Model` (engine/models/base.py): one rank's share of a decoder of transformers."""

    plans_attention = False
    attention_name = _NAME
    """Of the attention function that its code calls."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
        max_positions: int,
        fused: FusedOps | None = None,
    ) -> None:
        assert config.layout is not None
        self._layout, self._fused, self._max_positions = config.layout, fused, max_positions
        self.skips_unread = False
        """Whether the last layer leaves out tokens whose results nothing reads."""
        self.config, self.dtype, self.device, self.parallel = config, dtype, device, parallel
        layers = config.stage_layers(parallel.pp_size)[parallel.pp_rank]
        self._share = Share(config.layout, layers, parallel)
        self.attention_layers = tuple(
            AttentionLayer(number, call) for number, call in enumerate(self._share.calls)
        )
        self._step = _Step(self.attention_layers, parallel, fused)
        self.chain: Chain | None = None
        """In place of the decoder's own forward."""
        self.recorded: RecordedDecodes | None = None
        """Steps of the chain."""
        self._head: Linear | None = None
        """What alone makes logits of the decoder's result."""
        self._state_dtype = dtype
        """Of that result: some keep it in float32."""
        self._linears: AdaptedLinears | None = None

    def load(
        self, source: WeightSource, progress: Callable[[int, int], None] | None = None
    ) -> None:
        assert isinstance(source, CheckpointSource | DummySource)
        hub = AutoConfig.from_pretrained(self.config.path, trust_remote_code=False)
        given = {} if self.attention_name == _NAME else {"attn_implementation": self.attention_name}
        with torch.device("meta"):
            model = _CAUSAL.from_config(hub, dtype=self.dtype, trust_remote_code=False, **given)
        model.eval()
        weights = LazyWeights(model, source, self.dtype)
        self._expert_sizes = expert_sizes(model)
        with torch.no_grad():
            self._share.prune(model)
            # Latents are computed with matrices that are taken apart.
            keeps = source.format.keeps_groups and all(
                layer.call.latent_of is None for layer in self.attention_layers
            )
            self._share.fill(
                model,
                weights,
                self.device,
                progress,
                form=source.format,
                keeps_linears=keeps,
            )
            table = self._tie(model, source.format)
            has_rounded = isinstance(source.format, QuantizedFormat)
            if not has_rounded:  # before the matrices of latents are packed for nothing
                self._use_latents(model)
            self._replace_linears(model, source.format)
            if has_rounded:
                self._use_latents(model)
            for name, module in model.named_modules():
                if not is_experts(module):
                    continue
                share = self._share.experts(name, module.num_experts)
                if self.device.type == "cuda":
                    module.manta_experts = GroupedExperts(module, share)
                else:
                    module.manta_experts = Experts(module, source.format, share)
        point_at(model, self.attention_name, _NAME)
        fix_rotations(model, self._max_positions)
        for module in model.modules():
            module.manta_step = self._step
        self._keep_hidden(model)
        self._model = model
        self._find_decoder()
        if table is not None and not self.plans_attention:
            self._look_up_in_head(table)
        if self._fused is not None and not self.plans_attention:
            self._take_over(self._fused)
        self._find_head()
        self.attention_layers = self._step.layers = tuple(
            layer if sinks is None else replace(layer, sinks=sinks.detach().float().contiguous())
            for layer, sinks in zip(self.attention_layers, self._sinks(), strict=True)
        )

    @torch.inference_mode()
    def _use_latents(self, model: nn.Module) -> None:
        """Let attention work on latents where the layout says so."""
        calls = [layer.call for layer in self.attention_layers]
        call = next((call for call in calls if call.latent_of is not None), None)
        if call is not None:
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            load_latents(model, call, like, self.parallel.tp_size, self.parallel.tp_rank)

    def count_experts(self) -> dict[int, ExpertCounts]:
        found: dict[int, ExpertCounts] = {}
        for mixture in self._layout.mixtures:
            layer = self._layout.layer_of(mixture.name)
            if layer in self._share.layers:
                module: Any = self._model.get_submodule(mixture.name)
                counts = ExpertCounts(mixture.num_experts, self.device)
                module.manta_experts.counts = found[layer] = counts
        return found

    def allocate(self, num_rows: int) -> None:
        """Keys and values are all that it keeps."""

    def adapt(self, linears: AdaptedLinears) -> None:
        self._linears = linears
        inside = f"{self._layout.layers}." if self._layout.layers else ""
        by_product: dict[Product, list[tuple[int, str, Linear]]] = {}
        for name, module in self._model.named_modules():
            known = name.startswith(inside) and name.rpartition(".")[2] in _ADAPTED
            if known and isinstance(module, Linear) and module.gather_from is None:
                by_product.setdefault(module.product, []).append((module.number, name, module))
        for product, found in by_product.items():
            parts = [self._projection(name, linear) for _, name, linear in sorted(found)]
            linears.adapt(product, parts)
        for name, module in self._model.named_modules():
            if linears.takes_experts and name.startswith(inside) and is_experts(module):
                up, down = expert_projections(name, module, self._expert_sizes[name], self._share)
                linears.adapt_experts(module.manta_experts, up, down)
        if not self.plans_attention:
            numbers = torch.arange(6, device=self.device)
            received = self._received(numbers)
            linears.keep_those_called(lambda: self._trial(numbers, received), len(numbers))

    @torch.inference_mode()
    def _trial(self, numbers: Tensor, received: Tensor | None) -> None:
        """Compute tokens at their numbers, with an attention that looks at each alone."""
        self._step.backend = self._step.batch = None
        ids = numbers % self.config.vocab_size
        if self.chain is not None:
            self.chain(ids, numbers, received)
        else:
            self._run(ids, numbers, received)

    def _projection(self, name: str, linear: Linear) -> Projection:
        sizes, cut = [linear.out_features, linear.in_features], self._share.cut(name)
        if cut is None:
            return Projection(name, sizes[0], sizes[1], 0, (range(sizes[0]),))
        ranges = tuple(cut.ranges(self.parallel.tp_size, self.parallel.tp_rank))
        own = sum(map(len, ranges))
        assert sizes[cut.dim] == own, f"{name}: this rank has {sizes[cut.dim]} of {own}"
        sizes[cut.dim] = sum(part.size for part in cut.parts)
        return Projection(name, sizes[0], sizes[1], cut.dim, ranges)

    @property
    def decoder(self) -> nn.Module:
        """What is before the head."""
        module: nn.Module = self._decoder.module
        return module

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        hidden: Tensor | None,
        *,
        only_sampled: bool = False,
    ) -> Tensor:
        step = self._step
        step.backend, step.batch = backend, batch
        skips = only_sampled and self.skips_unread
        step.sampled = batch.logits_rows if skips else None
        if self.chain is not None:
            states = self._chained(self.chain, batch, backend, hidden)
        else:
            states = self._states(self._run(batch.input_ids, batch.positions, hidden))
            step.hidden = None
        if step.calls != len(step.layers):
            raise RuntimeError(f"{step.calls} of {len(step.layers)} attention calls were made")
        return states.index_select(0, batch.logits_rows) if only_sampled and not skips else states

    def _chained(
        self, chain: Chain, batch: ForwardBatch, backend: AttentionBackend, hidden: Tensor | None
    ) -> Tensor:
        step, x, done = self._step, chain.begin(batch.input_ids, hidden), None
        if self.recorded is not None and step.sampled is None:
            done = self.recorded(x, batch, backend)
            step.calls = len(step.layers)
        return chain.end(*(done or chain.run(x, batch.positions)))

    def _run_chain(
        self, hidden: Tensor, batch: ForwardBatch, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """The layers, for `RecordedDecodes`."""
        assert self.chain is not None
        self._step.backend, self._step.batch = backend, batch
        return self.chain.run(hidden, batch.positions)

    def _find_decoder(self) -> None:
        """Find the module before the head, and how it takes a step's tokens. Raises `ConfigError`
        if the model's code can't be used in the way that steps use it."""
        failures = [ConfigError(f"{type(self._model).__name__} has no decoder that stands alone.")]
        found = (self._model.base_model, self._model.get_decoder(), *self._model.children())
        for decoder in dict.fromkeys(found):
            known = inspect.signature(decoder.forward).parameters
            if decoder is self._model or "input_ids" not in known:
                continue
            takes_more = any(given.kind is given.VAR_KEYWORD for given in known.values())
            takes_positions = takes_more or "position_ids" in known
            for has_cache in (True, False):
                if has_cache and "past_key_values" not in known:
                    continue
                name = cache_argument(decoder)
                self._decoder = _Decoder(decoder, takes_positions, has_cache, name)
                failure = self._failure()
                if failure is None:
                    self._find_first_position()
                    return
                failures.append(failure)
        raise failures[-1]

    @torch.inference_mode()
    def _find_first_position(self) -> None:
        """Some count from behind the number of their padding token."""
        decoder = self._decoder
        padding = getattr(getattr(decoder.module, "config", None), "pad_token_id", None)
        if not decoder.takes_positions or not isinstance(padding, int):
            return
        numbers = torch.arange(6, device=self.device)
        ids = (padding + 1 + numbers) % self.config.vocab_size
        given: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        apart = []
        for first in (None, 0, padding + 1):
            received = self._received(numbers)
            self._step.begin(received)
            if first is not None:
                given["position_ids"] = numbers[None] + first
            apart.append(self._states(decoder.module(**given)))
        own, *found = apart
        if not difference(found[1], own) < difference(found[0], own):
            return
        decoder.first_position = padding + 1

    def _failure(self) -> ConfigError | None:
        """Why the decoder can't be used so."""
        name = type(self._model).__name__
        try:
            mixes, head = self._differences()
        except Exception as error:  # the code of any model
            return ConfigError(
                f"the code of {name} can't run on the tokens of several requests at once "
                f"({type(error).__name__}: {error}); it isn't supported yet."
            )
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not mixes <= tolerance:
            return ConfigError(
                f"{name} keeps states of requests beside attention, or counts positions by itself; "
                "that isn't supported yet."
            )
        if not head <= tolerance:
            return ConfigError(f"the output head of {name} isn't supported yet.")
        return None

    @torch.inference_mode()
    def _differences(self) -> tuple[float, float]:
        """With an attention to nothing else: by how much a token's hidden state depends on its
        place in the step and on the tokens beside it (those of other requests), and how far its
        logits are from those of the whole model. Relative to the largest number."""
        positions = torch.arange(6, device=self.device)
        ids = positions % self.config.vocab_size
        received = self._received(positions)
        out = self._run(ids, positions, received)
        self._decoder.output = type(out)
        found = self._states(out)[-1]
        self._state_dtype = found.dtype
        others = (ids + 6) % self.config.vocab_size
        others[2] = ids[-1]
        moved = torch.tensor([9, 3, 5, 0, 1, 7], device=self.device)  # the token's stays 5
        numbers = positions + 6
        numbers[2] = 5
        beside = self._states(self._run(others, moved, self._received(numbers)))[2]
        mixes = difference(found, beside)
        if not self.parallel.is_last_stage:
            return mixes, 0.0
        self._step.begin(received)
        given = self._decoder.given(ids[None], positions[None])
        whole = self._model(**given).logits[0, -1]
        return mixes, difference(whole, self.compute_logits(found[None])[0])

    def _take_over(self, fused: FusedOps) -> None:
        """Let our kernels compute what they can of the decoder, whose steps are one forward."""
        limit = max(self.config.max_position_embeddings, 1)
        numbers = torch.arange(6, device=self.device)
        ids, received = numbers % self.config.vocab_size, self._received(numbers)
        heads = [(layer.call.num_heads, layer.call.num_kv_heads) for layer in self.attention_layers]

        def run(num_positions: int, chain: Chain | None) -> Tensor:
            last = num_positions - 1
            places = [0, last // 50, last // 7, last // 3, last // 2, last]
            positions = torch.tensor(places, device=self.device)  # some scale queries by theirs
            if chain is not None:
                return chain(ids, positions, received)
            return self._states(self._run(ids, positions, received))

        takeover = Takeover(
            self._decoder.module,
            self._step,
            fused,
            heads,
            run,
            (limit, self._max_positions),
            self.parallel.is_last_stage,
        )
        try:
            takeover.replace()
        except IndexError as error:
            raise ConfigError(
                f"{type(self._model).__name__} has fewer positions than the {limit} that its "
                f"configuration names ({error})."
            ) from error
        self.skips_unread = takeover.skips_unread
        if self._decoder.first_position == 0:
            self.chain = takeover.chain
        if self.chain is not None:
            self.recorded = RecordedDecodes.of(self._run_chain, fused, self.parallel)

    @torch.inference_mode()
    def _find_head(self) -> None:
        head: Any = self._model.get_output_embeddings()
        if not self.parallel.is_last_stage or not isinstance(head, Linear):
            return
        if head.in_features != self.config.hidden_size:
            return
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn((3, head.in_features), generator=generator)
        hidden = hidden.to(self.device, self._state_dtype)
        if torch.equal(head(hidden.to(head.weight.dtype)), self.compute_logits(hidden)):
            self._head = head

    def _sinks(self) -> list[Tensor | None]:
        """Of each call, as the check has seen them."""
        return [self._step.sinks.get(layer.layer_id) for layer in self.attention_layers]

    def _received(self, tokens: Tensor) -> Tensor | None:
        """Something [T, hidden] in place of what an earlier stage makes of tokens below 12."""
        if self.parallel.is_first_stage:
            return None
        generator = torch.Generator().manual_seed(0)
        made = torch.randn((12, self.config.hidden_size), generator=generator)
        return made.to(self.device, self.dtype)[tokens]

    def _run(self, ids: Tensor, positions: Tensor, hidden: Tensor | None) -> Any:
        """The decoder's output for tokens `ids` [T] at `positions` [T], of which an earlier stage
        has made `hidden` [T, hidden]."""
        self._step.begin(hidden)
        return self._decoder.module(**self._decoder.given(ids[None], positions[None]))

    def _states(self, out: Any) -> Tensor:
        """[T, hidden] of a forward: behind the final norm on the last stage."""
        found: Tensor | None = out.last_hidden_state
        if not self.parallel.is_last_stage:
            found = self._step.hidden
        assert found is not None
        return found[0]

    def _keep_hidden(self, model: Any) -> None:
        """Let the last layer of a stage keep its result; those behind it are absent."""
        if self.parallel.is_last_stage:
            return

        def keep(module: nn.Module, args: Any, out: Any) -> None:
            self._step.hidden = out[0] if isinstance(out, tuple | list) else out

        last = f"{self._share.layout.layers}.{self._share.layers.stop - 1}"
        model.get_submodule(last).register_forward_hook(keep)

    def _tie(self, model: Any, form: WeightFormat) -> PackedTable | None:
        """Let a head multiply by the embedding's matrix where that is its own. What the embedding
        can look its rows up in, if that is another form of the matrix."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
            return None
        is_own = head.weight is embedding.weight and head.bias is None
        name = next(name for name, module in model.named_modules() if module is head)
        if not is_own or name in self._layout.read:
            return None
        table, kernel = form.tied(head.weight.data)
        product, dtype = Product([head], form, kernel), head.weight.dtype
        replace_module(model, head, Linear(product, 0, dtype))
        return table if isinstance(table, PackedTable) else None

    @torch.inference_mode()
    def _look_up_in_head(self, table: PackedTable) -> None:
        """Let the embedding look its rows up in `table`, so that the matrix is kept once, unless
        the model's code reads the matrix itself."""
        own = self._model.get_input_embeddings()
        tied = TiedEmbedding.of(own, table)
        if tied is None:
            return
        numbers = torch.arange(6, device=self.device)
        ids, received = numbers % self.config.vocab_size, self._received(numbers)

        def results() -> list[Tensor]:
            states = self._states(self._run(ids, numbers, received))
            return [states, self.compute_logits(states[-1:])]

        before = results()
        replace_module(self._model, own, tied)
        try:
            same = all(torch.equal(a, b) for a, b in zip(results(), before, strict=True))
        except Exception:  # the code of any model: there is nothing to read
            same = False
        if not same:
            replace_module(self._model, tied, own)

    def _replace_linears(self, model: nn.Module, form: WeightFormat) -> None:
        """Let our kernels multiply by the matrices of all `nn.Linear`, in place."""
        for path, module in list(model.named_modules()):
            for names in _TOGETHER:
                found = [getattr(module, name, None) for name in names]
                linears = [child for child in found if type(child) is nn.Linear]
                if len(linears) == len(names) and _fit(linears):
                    product, dtype = Product(linears, form), linears[0].weight.dtype
                    for number, name in enumerate(names):
                        setattr(module, name, Linear(product, number, dtype))
            for name, child in list(module.named_children()):
                full, parallel = f"{path}.{name}" if path else name, self.parallel
                if type(child) is nn.Linear and full not in self._layout.read:
                    linear = Linear(
                        Product([child], form),
                        0,
                        child.weight.dtype,
                        sum_over=parallel if self._share.is_row(full) else None,
                        gather_from=parallel if self._share.is_gathered(full) else None,
                    )
                    setattr(module, name, linear)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The model's own code has applied it."""
        return hidden.clone()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The model's own forward behind its decoder: with all its scales and caps."""
        if self._head is not None:
            found: Tensor = self._head(hidden.to(self._head.weight.dtype))
            return found
        self._step.calls = 0
        module, output = self._decoder.module, self._decoder.output
        forward = module.forward
        module.forward = lambda *args, **kwargs: output(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros((1, 1), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            module.forward = forward
        return logits


def difference(a: Tensor, b: Tensor) -> float:
    """The largest, relative to the largest number of `b`."""
    a, b = a.float(), b.float()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def _fit(linears: list[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.bias is None) for linear in linears}
    return len(kinds) == 1
