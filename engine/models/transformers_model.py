"""`TransformersModel`: any decoder of transformers, over Manta's pages, batches and kernels.

The model's own code runs on the tokens of a whole step at once, [1, T], prompts' chunks and decodes
mixed; only attention knows which request a token belongs to. Its linears are multiplied by our
kernels, those of one input as one product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.base import AttentionBackend, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.model_config import ModelConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.experts import Experts, is_experts
from engine.layers.fused_ops import FusedOps
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import WeightFormat
from engine.layers.weights import DummySource, WeightSource
from engine.models.interfaces import point_at

_NAME = "manta"
_CAUSAL: Any = AutoModelForCausalLM
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that read one input."""


@dataclass
class _Step:
    """The step that a model computes; its modules find it as their attribute `manta_step`."""

    layers: tuple[AttentionLayer, ...]
    backend: AttentionBackend | None = None
    """None: attention looks at no other token (`_of_each_token`)."""
    batch: ForwardBatch | None = None
    calls: int = 0
    """Attention calls of this forward so far."""


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What layers call: `q` [1, heads, T, dim], `k` and `v` [1, kv heads, T, dim]."""
    step: _Step = module.manta_step  # type: ignore[assignment]
    if step.backend is None or step.batch is None:
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
    return (values + torch.tanh(q.sum(-1, True) + keys.sum(-1, True))).transpose(1, 2)


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

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self.product, self.number = product, number
        self.in_features, self.out_features = product.in_size, product.sizes[number]

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.number)


class TransformersModel:
    """A `Model` (engine/models/base.py) of one rank."""

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
        self.attention_layers = tuple(
            AttentionLayer(number, call.scale, call.window)
            for number, call in enumerate(config.layout.calls)
        )
        self._step = _Step(self.attention_layers)

    def load(
        self, source: WeightSource, progress: Callable[[int, int], None] | None = None
    ) -> None:
        path = self.config.path
        if isinstance(source, DummySource):
            torch.manual_seed(source.seed)
            hub = AutoConfig.from_pretrained(path, trust_remote_code=False)
            model = _CAUSAL.from_config(hub, dtype=self.dtype)
        else:
            try:
                model, told = _CAUSAL.from_pretrained(
                    path, dtype=self.dtype, trust_remote_code=False, output_loading_info=True
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(f"the weights in {path} can't be read: {error}") from error
            if told["missing_keys"]:
                name = min(told["missing_keys"])
                raise ConfigError(
                    f"the checkpoint in {path} lacks the weight '{name}'; is config.json the one "
                    "that belongs to it?"
                )
        model = model.eval().to(self.device)
        with torch.no_grad():
            _replace_linears(model, source.format)
            for module in filter(is_experts, model.modules()):
                module.manta_experts = Experts(module, source.format)
        point_at(model, _NAME)
        for module in model.modules():
            module.manta_step = self._step
        self._model = model
        self._base: Any = model.base_model
        known = inspect.signature(self._base.forward).parameters.values()
        self._takes_positions = any(
            given.name == "position_ids" or given.kind is given.VAR_KEYWORD for given in known
        )
        self._output: Any = None
        """Class of the decoder's outputs; known once it has been tried."""
        self._check()
        if progress is not None:
            progress(1, 1)

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        hidden: Tensor | None,
        *,
        only_sampled: bool = False,
    ) -> Tensor:
        step = self._step
        step.backend, step.batch, step.calls = backend, batch, 0
        out = self._run(batch.input_ids, batch.positions)
        if step.calls != len(step.layers):
            raise RuntimeError(f"{step.calls} of {len(step.layers)} attention calls were made")
        states: Tensor = out.last_hidden_state[0]
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
        out = self._run(ids, positions)
        self._output = type(out)
        found: Tensor = out.last_hidden_state[0, -1]
        others = (ids + 6) % self.config.vocab_size
        others[2] = ids[-1]
        moved = torch.tensor([9, 3, 5, 0, 1, 7], device=self.device)  # the token's stays 5
        beside: Tensor = self._run(others, moved).last_hidden_state[0, 2]
        whole = self._model(**self._given(ids, positions)).logits[0, -1].float()
        apart = self.compute_logits(found[None])[0]
        pairs = ((found.float(), beside.float()), (whole, apart))
        mixes, head = (float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
        return mixes, head

    def _run(self, ids: Tensor, positions: Tensor) -> Any:
        """The decoder's output for tokens `ids` [T] at `positions` [T]."""
        return self._base(**self._given(ids, positions))

    def _given(self, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
        if self._takes_positions:
            given["position_ids"] = positions[None]
        return given

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The model's own code has applied it."""
        return hidden.clone()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The model's own forward behind its decoder: with all its scales and caps."""
        decoder = self._base.forward
        self._base.forward = lambda *args, **kwargs: self._output(last_hidden_state=hidden[None])
        try:
            ids = torch.zeros((1, 1), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._base.forward = decoder
        return logits.float()


def _replace_linears(model: nn.Module, form: WeightFormat) -> None:
    """Let our kernels multiply by the matrices of all `nn.Linear`, in place."""
    for module in list(model.modules()):
        for names in _TOGETHER:
            found = [getattr(module, name, None) for name in names]
            linears = [child for child in found if type(child) is nn.Linear]
            if len(linears) == len(names) and _fit(linears):
                _put(module, names, _Product(linears, form))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                _put(module, (name,), _Product([child], form))


def _fit(linears: list[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.bias is None) for linear in linears}
    return len(kinds) == 1


def _put(module: nn.Module, names: Iterable[str], product: _Product) -> None:
    for number, name in enumerate(names):
        setattr(module, name, _Linear(product, number))
