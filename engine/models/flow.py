"""`Flow`: which linears, layers and attention calls the tensors of one forward come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

Sources = frozenset[str]
EMBEDDING = "(embedding)"


@dataclass
class Call:
    """An attention call: the module that made it, and what its operands come from."""

    module: str
    q: Sources
    k: Sources
    v: Sources

    @property
    def tag(self) -> str:
        """What the call's result comes from."""
        return f"(attention of {self.module})"


@dataclass
class Inputs:
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class LayerFlow:
    """What a decoder layer got and gave."""

    hidden: bool
    """Whether it got the very tensor that the layer before it gave."""
    others: Sources
    """What its other arguments come from."""
    made_of: Sources
    """What its result comes from, within it."""
    returns_tuple: bool


class _Tags(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results of every operation the names that its inputs carry."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = sources_of((args, kwargs))
        for tensor in _tensors(out):
            tensor.manta_sources = found  # type: ignore[attr-defined]
        return out


@dataclass
class Flow:
    """While it is followed, tensors carry the names of what they were computed from.

    A linear's result comes from that linear alone, the result of a decoder layer from that layer.
    """

    model: nn.Module
    layers: nn.ModuleList | None = None
    calls: list[Call] = field(default_factory=list)
    linears: dict[str, Sources] = field(default_factory=dict)
    """Of each linear that was called: what its input comes from."""
    times: Counter[str] = field(default_factory=Counter)
    """How often each was called."""
    inputs: dict[str, Inputs] = field(default_factory=dict)
    """Of every module inside a layer, and of the layers."""
    embeddings: list[str] = field(default_factory=list)
    """Those outside the layers that were called."""
    layer_flows: list[LayerFlow] = field(default_factory=list)
    result: Sources = frozenset()
    """What the decoder's result comes from."""

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._last: Tensor | None = None

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Note what the model computes meanwhile."""
        handles = self._hooks()
        try:
            with _Tags():  # type: ignore[no-untyped-call]
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self) -> list[RemovableHandle]:
        inside = set() if self.layers is None else {id(m) for m in self.layers.modules()}
        handles = []
        for module in self.model.modules():
            if type(module) is nn.Linear:
                handles.append(module.register_forward_hook(self._linear))
            elif isinstance(module, nn.Embedding) and id(module) not in inside:
                handles.append(module.register_forward_hook(self._embedding))
            if id(module) in inside:
                hook = self._note_inputs
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for layer in self.layers or ():
            handles.append(layer.register_forward_hook(self._layer, with_kwargs=True))
        base: Any = self.model.base_model
        handles.append(base.register_forward_hook(self._base))
        return handles

    def attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Note an attention call with the result `out`, which it returns."""
        operands = (sources_of(x) for x in (q, k, v))
        call = Call(self._names[id(module)], *operands)
        self.calls.append(call)
        out.manta_sources = frozenset((call.tag,))  # type: ignore[attr-defined]
        return out

    def _linear(self, module: nn.Module, args: Any, out: Tensor) -> None:
        name = self._names[id(module)]
        self.times[name] += 1
        self.linears[name] = sources_of(args)
        out.manta_sources = frozenset((name,))  # type: ignore[attr-defined]

    def _embedding(self, module: nn.Module, args: Any, out: Any) -> None:
        self.embeddings.append(self._names[id(module)])
        for tensor in _tensors(out):
            tensor.manta_sources = frozenset((EMBEDDING,))  # type: ignore[attr-defined]

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.inputs[self._names[id(module)]] = Inputs(args, kwargs)

    def _layer(self, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        given = list(_tensors((args, kwargs)))
        others = [x for x in given if x is not self._last]
        returns_tuple = isinstance(out, tuple | list)
        hidden = out[0] if returns_tuple else out
        flow = LayerFlow(
            hidden=len(others) < len(given),
            others=sources_of(others),
            made_of=sources_of(hidden),
            returns_tuple=returns_tuple,
        )
        self.layer_flows.append(flow)
        # A tensor of its own: a layer may return what it got.
        given_on: Tensor = hidden.view(hidden.shape)
        tag = layer_tag(len(self.layer_flows) - 1)
        given_on.manta_sources = frozenset((tag,))  # type: ignore[attr-defined]
        self._last = given_on
        return type(out)([given_on, *out[1:]]) if returns_tuple else given_on

    def _base(self, module: nn.Module, args: Any, out: Any) -> None:
        self.result = sources_of(out[0])


def layer_tag(number: int) -> str:
    """What the result of a decoder layer comes from."""
    return f"(layer {number})"


def sources_of(tensors: Any) -> Sources:
    """What the tensors in a structure of tuples, lists and dicts come from."""
    found: Iterable[Sources] = (getattr(x, "manta_sources", frozenset()) for x in _tensors(tensors))
    return frozenset().union(*found)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
