"""`TransformersModel`: any decoder of transformers, over Manta's pages, batches and kernels.

The model's own code runs on the tokens of a whole step at once, [1, T], prompts' chunks and decodes
mixed; only attention knows which request a token belongs to. Its linears are multiplied by our
kernels, those of one input as one product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.base import AttentionBackend, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.layout import AttentionCall
from engine.checkpoint.model_config import ModelConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.experts import Experts, is_experts
from engine.layers.fused_ops import FusedOps
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import WeightFormat
from engine.layers.weights import DummySource, SafetensorsSource, WeightSource
from engine.models.cuts import own_heads
from engine.models.interfaces import point_at
from engine.models.lazy_weights import LazyWeights
from engine.models.share import Share

_NAME = "manta"
_CAUSAL: Any = AutoModelForCausalLM
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that read one input."""


@dataclass
class _Step:
    """The step that a model computes; its modules find it as their attribute `manta_step`."""

    layers: tuple[AttentionLayer, ...]
    rank_calls: tuple[AttentionCall, ...]
    """The attention calls of `layers`, with this rank's heads."""
    parallel: ParallelState
    backend: AttentionBackend | None = None
    """None: attention looks at no other token (`_of_each_token`)."""
    batch: ForwardBatch | None = None
    calls: int = 0
    """Attention calls of this forward so far."""
    hidden: Tensor | None = None
    """[1, T, hidden] between stages: received from the one before, then what is to be sent."""


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What layers call: `q` [1, heads, T, dim], `k` and `v` [1, kv heads, T, dim]."""
    step: _Step = module.manta_step  # type: ignore[assignment]
    call, parallel = step.rank_calls[step.calls], step.parallel
    q = own_heads(q, call.num_heads, parallel.tp_size, parallel.tp_rank)
    k, v = (own_heads(x, call.num_kv_heads, parallel.tp_size, parallel.tp_rank) for x in (k, v))
    if step.backend is None or step.batch is None:
        step.calls += 1
        return _of_each_token(q, k, v), None
    layer = step.layers[step.calls]
    step.calls += 1
    queries, keys, values = (_by_token(x) for x in (q, k, v))
    out = step.backend.forward(queries, keys, values, layer, step.batch)
    return out.view(1, len(out), queries.shape[1], -1), None


def _of_each_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, T, heads, dim]: something of a token's own query, key and value, as they are rotated."""
    copies = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(copies, 1) for x in (k, v))
    return (values + torch.tanh(q.sum(-1, True) + keys.sum(-1, True))).transpose(1, 2).contiguous()


def _by_token(x: Tensor) -> Tensor:
    """[T, heads, dim] of [1, heads, T, dim]; the heads of a token lie one behind the other."""
    x = x[0].transpose(0, 1)
    lies_so = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if lies_so else x.clone(memory_format=torch.contiguous_format)


def _experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What a mixture of experts calls."""
    experts: Experts = module.manta_experts  # type: ignore[assignment]
    return experts(hidden, chosen, weights)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts)


class _Product:
    """Linears of one input as one product: the first that is asked computes for all."""

    def __init__(self, linears: list[nn.Linear], form: WeightFormat) -> None:
        self.in_size = linears[0].in_features
        self.sizes = [linear.out_features for linear in linears]
        weights = [linear.weight.data for linear in linears]
        biases = [linear.bias.data for linear in linears if linear.bias is not None]
        self.kernel: LinearKernel = form.linear(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            torch.cat(biases) if biases else None,
        )
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, number: int) -> Tensor:
        """[..., in_size] -> [..., sizes[number]]"""
        if self._input is not x:
            out = self.kernel(x.reshape(-1, self.in_size))
            self._parts = torch.split(out.view(*x.shape[:-1], sum(self.sizes)), self.sizes, -1)
            self._input = x
        found = self._parts[number]
        if number == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return found


class _Linear(nn.Module):
    """In place of an `nn.Linear`."""

    def __init__(
        self,
        product: _Product,
        number: int,
        *,
        sum_over: ParallelState | None = None,
        gather_from: ParallelState | None = None,
    ) -> None:
        """`sum_over`: the ranks that have the other inputs. `gather_from`: those that have the
        other outputs, which are wanted, too."""
        super().__init__()
        self.product, self.number = product, number
        self.sum_over, self.gather_from = sum_over, gather_from
        self.in_features, self.out_features = product.in_size, product.sizes[number]

    def forward(self, x: Tensor) -> Tensor:
        found = self.product.part(x, self.number)
        if self.gather_from is not None:
            whole = self.gather_from.all_gather_last_dim(found.flatten(0, -2))
            return whole.view(*found.shape[:-1], -1)
        return found if self.sum_over is None else self.sum_over.all_reduce(found)


class TransformersModel:
    """A `Model` (engine/models/base.py): one rank's share of a decoder of transformers."""

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
        self.config, self.dtype, self.device, self.parallel = config, dtype, device, parallel
        layers = config.stage_layers(parallel.pp_size)[parallel.pp_rank]
        self._share = Share(config.layout, layers, parallel)
        self.attention_layers = tuple(
            AttentionLayer(number, call.scale, call.window)
            for number, call in enumerate(self._share.calls)
        )
        self._step = _Step(self.attention_layers, self._share.calls, parallel)

    def load(
        self, source: WeightSource, progress: Callable[[int, int], None] | None = None
    ) -> None:
        assert isinstance(source, SafetensorsSource | DummySource)
        hub = AutoConfig.from_pretrained(self.config.path, trust_remote_code=False)
        with torch.device("meta"):
            model = _CAUSAL.from_config(hub, dtype=self.dtype, trust_remote_code=False)
        model.eval()
        weights = LazyWeights(model, source, self.dtype)
        with torch.no_grad():
            self._share.prune(model)
            self._share.fill(model, weights, self.device, progress)
            self._replace_linears(model, source.format)
            for module in filter(is_experts, model.modules()):
                module.manta_experts = Experts(module, source.format, self.parallel)
        point_at(model, _NAME)
        for module in model.modules():
            module.manta_step = self._step
        self._keep_hidden(model)
        self._model = model
        self._base: Any = model.base_model
        known = inspect.signature(self._base.forward).parameters.values()
        self._takes_positions = any(
            given.name == "position_ids" or given.kind is given.VAR_KEYWORD for given in known
        )
        self._output: Any = None
        """Class of the decoder's outputs; known once it has been tried."""
        self._check()

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
        out = self._run(batch.input_ids, batch.positions, hidden)
        if step.calls != len(step.layers):
            raise RuntimeError(f"{step.calls} of {len(step.layers)} attention calls were made")
        states = self._states(out)
        step.hidden = None
        return states.index_select(0, batch.logits_rows) if only_sampled else states

    def _check(self) -> None:
        """Raise `ConfigError` if the model's code can't be used in the way that steps use it."""
        name = type(self._model).__name__
        try:
            mixes, head = self._differences()
        except Exception as error:  # the code of any model
            raise ConfigError(
                f"the code of {name} can't run on the tokens of several requests at once "
                f"({type(error).__name__}: {error}); it isn't supported yet."
            ) from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not mixes <= tolerance:
            raise ConfigError(
                f"{name} keeps states of requests beside attention, or counts positions by itself; "
                "that isn't supported yet."
            )
        if not head <= tolerance:
            raise ConfigError(f"the output head of {name} isn't supported yet.")

    @torch.inference_mode()
    def _differences(self) -> tuple[float, float]:
        """With an attention to nothing else: by how much a token's hidden state depends on its
        place in the step and on the tokens beside it (those of other requests), and how far its
        logits are from those of the whole model. Relative to the largest number."""
        positions = torch.arange(6, device=self.device)
        ids = positions % self.config.vocab_size
        received = self._received(positions)
        out = self._run(ids, positions, received)
        self._output = type(out)
        found = self._states(out)[-1]
        others = (ids + 6) % self.config.vocab_size
        others[2] = ids[-1]
        moved = torch.tensor([9, 3, 5, 0, 1, 7], device=self.device)  # the token's stays 5
        numbers = positions + 6
        numbers[2] = 5
        beside = self._states(self._run(others, moved, self._received(numbers)))[2]
        mixes = _difference(found.float(), beside.float())
        if not self.parallel.is_last_stage:
            return mixes, 0.0
        self._begin(received)
        whole = self._model(**self._given(ids, positions)).logits[0, -1].float()
        return mixes, _difference(whole, self.compute_logits(found[None])[0])

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
        self._begin(hidden)
        return self._base(**self._given(ids, positions))

    def _begin(self, hidden: Tensor | None) -> None:
        self._step.calls = 0
        self._step.hidden = None if hidden is None else hidden[None]

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

    def _given(self, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if self._takes_positions:
            given["position_ids"] = positions[None]
        return given

    def _replace_linears(self, model: nn.Module, form: WeightFormat) -> None:
        """Let our kernels multiply by the matrices of all `nn.Linear`, in place."""
        for path, module in list(model.named_modules()):
            for names in _TOGETHER:
                found = [getattr(module, name, None) for name in names]
                linears = [child for child in found if type(child) is nn.Linear]
                if len(linears) == len(names) and _fit(linears):
                    product = _Product(linears, form)
                    for number, name in enumerate(names):
                        setattr(module, name, _Linear(product, number))
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    full, parallel = f"{path}.{name}" if path else name, self.parallel
                    linear = _Linear(
                        _Product([child], form),
                        0,
                        sum_over=parallel if self._share.is_row(full) else None,
                        gather_from=parallel if self._share.is_gathered(full) else None,
                    )
                    setattr(module, name, linear)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The model's own code has applied it."""
        return hidden.clone()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The model's own forward behind its decoder: with all its scales and caps."""
        self._step.calls = 0
        decoder = self._base.forward
        self._base.forward = lambda *args, **kwargs: self._output(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros((1, 1), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._base.forward = decoder
        return logits.float()


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest, relative to the largest number of `b`."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def _fit(linears: list[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.bias is None) for linear in linears}
    return len(kinds) == 1
