"""`ModelShape`: where a model of transformers has its layers, and how many numbers are where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ModelShape:
    """See the fields of the same names in `engine.checkpoint.layout.ModelLayout`."""

    layers: str
    layer_parameters: tuple[int, ...]
    embedding_parameters: int
    head_parameters: int
    is_tied: bool
    other_parameters: int
    layer_of_call: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, callers: list[str]) -> ModelShape:
        """`callers`: the modules that make the attention calls, in order."""
        found = decoder_layers(model)
        embeddings = {id(p) for module in outer_embeddings(model) for p in module.parameters()}
        output = model.get_output_embeddings()
        head = set() if output is None else {id(p) for p in output.parameters()}
        whole = {id(p): p.numel() for p in model.parameters()}
        inside: set[int] = set()
        per_layer = []
        for layer in [] if found is None else found[1]:
            own = {id(p) for p in layer.parameters()} - inside
            inside |= own
            per_layer.append(sum(whole[number] for number in own))
        others = whole.keys() - inside - embeddings - head
        name = "" if found is None else found[0]
        if found is None:
            per_layer, others = [sum(whole[number] for number in others)], set()
        return cls(
            layers=name,
            layer_parameters=tuple(per_layer),
            embedding_parameters=sum(whole[number] for number in embeddings - inside),
            head_parameters=sum(whole[number] for number in head - inside),
            is_tied=bool(head & embeddings),
            other_parameters=sum(whole[number] for number in others),
            layer_of_call=tuple(layer_of(caller, name) for caller in callers),
        )


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Name and list of the decoder's layers: of the outermost lists, the one with most parameters.
    None if there is no list."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inner:
            lists.append((name, module))
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()), default=None)


def outer_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """The embeddings that a model has outside its layers."""
    found = decoder_layers(model)
    inside = set() if found is None else {id(module) for module in found[1].modules()}
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and id(module) not in inside
    ]


def layer_of(module: str, layers: str) -> int:
    """The decoder layer that a module is in; 0 if the model has no list of them."""
    if not layers or not module.startswith(f"{layers}."):
        return 0
    return int(module.removeprefix(f"{layers}.").split(".")[0])
