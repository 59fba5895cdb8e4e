"""`ModelShape`: where a model of transformers has its layers, and how many numbers are where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from engine.checkpoint.layout import layer_of
from engine.models.flow import Flow


@dataclass(frozen=True)
class ModelShape:
    """See the fields of the same names in `engine.checkpoint.layout.ModelLayout`."""

    layers: str
    layer_parameters: tuple[int, ...]
    embedding_parameters: int
    head: str
    head_parameters: int
    is_tied: bool
    other_parameters: int
    layer_of_call: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, flow: Flow) -> ModelShape:
        """Of a model whose forward `flow` has followed."""
        found = decoder_layers(model)
        outer = [model.get_submodule(name) for name in flow.embeddings]
        embeddings = {id(p) for module in outer for p in module.parameters()}
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
            head=_head_name(model, output),
            head_parameters=sum(whole[number] for number in head - inside),
            is_tied=bool(head & embeddings),
            other_parameters=sum(whole[number] for number in others),
            layer_of_call=tuple(layer_of(call.module, name) for call in flow.calls),
        )


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Name and list of the decoder's layers: of the outermost lists, one as long as the
    configuration says, and of several the one with most parameters. None if there is no list."""
    length = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inner:
            lists.append((name, module))
    return max(lists, key=lambda item: (len(item[1]) == length, _numel(item[1])), default=None)


def _head_name(model: Any, output: nn.Module | None) -> str:
    """Name of the output head if it is a linear of as many outputs as there are tokens."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if type(output) is not nn.Linear or output.out_features != vocab_size:
        return ""
    names = {id(module): str(name) for name, module in model.named_modules()}
    return names[id(output)]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
