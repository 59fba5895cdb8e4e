"""`Share`: what one rank has of a model of transformers: a stage's layers, a part of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import guard_torch_init_functions

from engine.checkpoint.layout import Cut, MixtureCut, ModelLayout, Part, rank_calls
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.expert_share import ExpertShare
from engine.layers.experts import is_experts, set_kernels
from engine.layers.weight_format import PlainFormat, WeightFormat
from engine.models.cuts import localize, take_ranges
from engine.models.lazy_weights import LazyWeights
from engine.models.linears import set_groups

_PLAIN = PlainFormat()


class Share:
    """The stage of pipeline rank `parallel.pp_rank`, and of it what tensor parallel rank
    `parallel.tp_rank` has."""

    def __init__(self, layout: ModelLayout, layers: range, parallel: ParallelState) -> None:
        self.layout, self.layers, self.parallel = layout, layers, parallel
        self.calls = rank_calls(layout.calls, parallel.tp_size, layers)
        self._cuts: dict[str, Cut] = {}
        self._pieces: dict[str, list[tuple[int, list[range]]]] = {}
        """What a rank has of a mixture's parameter, along each dimension that is divided."""
        self._zeros: set[str] = set()
        """Of these, what the first rank of the group adds alone."""
        self._shares: dict[str, ExpertShare] = {}
        """By name of a mixture."""
        if parallel.tp_size > 1:
            self._cuts = {cut.name: cut for cut in layout.cuts}
            for mixture in layout.mixtures:
                self._divide(mixture)
        if layout.divides_head(parallel.tp_size):
            tokens = (Part(layout.vocab_size, layout.vocab_size),)
            for name in (f"{layout.head}.weight", f"{layout.head}.bias"):
                self._cuts[name] = Cut(name, 0, tokens, layout.vocab_size)

    def prune(self, model: Any) -> None:
        """Take out of `model`, which is built on `meta`, what other stages have, and make its
        modules ready for a rank's heads."""
        if self.parallel.pp_size > 1:
            layers = model.get_submodule(self.layout.layers)
            for number, layer in enumerate(list(layers)):
                if number not in self.layers:
                    layers[number] = AbsentLayer(layer, self.layout.layers_return_tuples)
            if not self.parallel.is_first_stage:
                for name in self.layout.embeddings:
                    embedding = model.get_submodule(name)
                    replace_module(model, embedding, NoEmbedding(embedding))
            head = model.get_output_embeddings()
            if not self.parallel.is_last_stage and head is not None:
                replace_module(model, head, NoHead())
        if self.parallel.tp_size > 1:
            for name in self.layout.local_modules:
                number = self.layout.layer_of(name)
                if number in self.layers:
                    call = next(call for call in self.layout.calls if call.layer == number)
                    localize(model.get_submodule(name), call.expanded, self.parallel.tp_size)

    def fill(
        self,
        model: Any,
        weights: LazyWeights,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        *,
        form: WeightFormat = _PLAIN,
        keeps_linears: bool = False,
    ) -> None:
        """Read the weights of a pruned `model`; `progress(done, total)` after each layer. What no
        checkpoint has, such as frequencies of rotations, is made on the CPU as transformers does.
        If `form` keeps groups, experts keep quantized matrices as they are, as its products
        (`set_kernels`), and with `keeps_linears` linears of layers, too (`groups_of`).

        Raises `ConfigError` if the checkpoint doesn't fit.
        """
        names = list(model.state_dict())
        ties = {name: other for name in names if (other := weights.tied_to(name)) is not None}
        inner = []
        if self.layout.layers:
            inner = [f"{self.layout.layers}.{layer}." for layer in self.layers]
        outer = [name for name in names if not name.startswith(tuple(inner))]
        apart = ties.keys() | set(ties.values())
        self._read(model, weights, [name for name in outer if name not in apart])
        for shared in dict.fromkeys(ties.values()):
            users = [name for name in names if shared in (name, ties.get(name))]
            for _, whole in weights.read([shared]):
                parameter = nn.Parameter(whole, False)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
                _clear_padding(model, shared, parameter)
                for name in users:
                    self._keep(model, name, parameter)
        for done, prefix in enumerate(inner, 1):
            own = [name for name in names if name.startswith(prefix) and name not in apart]
            if keeps_linears:
                own = [name for name in own if not self._keep_groups(model, weights, name)]
            experts = []
            if form.keeps_groups:
                experts = [name for name in own if _is_of_experts(model, name)]
                own = [name for name in own if name not in experts]
            self._read(model, weights, own)
            for name in experts:  # their biases are there
                if not self._keep_experts(model, weights, name, form):
                    self._read(model, weights, [name])
            if progress is not None:
                progress(done, len(inner))
        for linear in model.modules():
            if type(linear) is nn.Linear:
                linear.out_features, linear.in_features = linear.weight.shape
        missing = {name for name, value in model.state_dict().items() if value.is_meta}
        model._move_missing_keys_from_meta_to_device(missing, {"": "cpu"}, None, None)
        model._initialize_missing_keys(False)
        model.to(device)
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_meta:
                raise ConfigError(f"'{name}' of {self.layout.class_name} got no value.")

    def experts(self, name: str, num_experts: int) -> ExpertShare:
        """What the rank has of the mixture of this name."""
        alone = ExpertShare(range(num_experts), num_experts, ParallelState.single())
        return self._shares.get(name, alone)

    def pieces(self, name: str) -> list[tuple[int, list[range]]]:
        """By dimension: what the rank has of a mixture's parameter, where that isn't all."""
        return self._pieces.get(name, [])

    def mixture_parts(self, name: str) -> tuple[Part, ...] | None:
        """The parts of a mixture's parameter that ranks have equal shares of; None: not known."""
        cuts = (cut for mixture in self.layout.mixtures for cut in mixture.cuts)
        return next((cut.parts for cut in cuts if cut.name == name), None)

    def cut(self, linear: str) -> Cut | None:
        """How ranks divide a linear's weight; None: each has all of it."""
        return self._cuts.get(f"{linear}.weight")

    def is_row(self, linear: str) -> bool:
        """Whether ranks have parts of this linear's inputs, so that their results are added."""
        cut = self.cut(linear)
        return cut is not None and cut.dim == 1

    def is_gathered(self, linear: str) -> bool:
        """Whether ranks have parts of this linear's outputs, and its callers want all of them."""
        return linear == self.layout.head and f"{linear}.weight" in self._cuts

    def _divide(self, mixture: MixtureCut) -> None:
        """Note the rank's share of the mixture."""
        tp_size = self.parallel.tp_size
        groups = self.layout.expert_groups(tp_size, self.parallel.ep_size)
        ranks = tp_size // groups
        group, place = divmod(self.parallel.tp_rank, ranks)
        mine = mixture.experts(group, groups)
        experts = [(0, _runs(mine))]
        for cut in mixture.cuts:
            inner = [(cut.dim, cut.ranges(ranks, place))] if ranks > 1 else []
            self._pieces[cut.name] = experts + inner
        for name in mixture.whole:
            self._pieces[name] = experts
            if place > 0:
                self._zeros.add(name)
        self._shares[mixture.name] = ExpertShare(mine, mixture.num_experts, self.parallel)

    def _read(self, model: Any, weights: LazyWeights, names: list[str]) -> None:
        for name, value in weights.read(names):
            self._keep(model, name, value)

    def _keep_groups(self, model: Any, weights: LazyWeights, name: str) -> bool:
        """Whether `name` is the weight of a linear that now has it quantized, this rank's part."""
        owner, _, attribute = name.rpartition(".")
        linear, cut = model.get_submodule(owner), self._cuts.get(name)
        if type(linear) is not nn.Linear or attribute != "weight" or owner in self.layout.read:
            return False
        dim, ranges = 0, [range(linear.weight.shape[0])]
        if cut is not None:
            dim, ranges = cut.dim, cut.ranges(self.parallel.tp_size, self.parallel.tp_rank)
        if len(ranges) != 1 or name in self._pieces:
            return False
        groups = weights.quantized(name, dim, ranges[0])
        if groups is None:
            return False
        set_groups(linear, groups, linear.weight.dtype)
        return True

    def _keep_experts(
        self, model: Any, weights: LazyWeights, name: str, form: WeightFormat
    ) -> bool:
        """Whether a mixture now has its parameter `name` as products with quantized matrices, those
        of the rank's experts and its part of each."""
        owner, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        shape, pieces = getattr(module, attribute).shape, dict(self._pieces.get(name, ()))
        numbers, first, second = (pieces.get(dim, [range(size)]) for dim, size in enumerate(shape))
        rows, columns = (second, first) if module.is_transposed else (first, second)
        if name in self._cuts or len(columns) != 1:
            return False
        bias: Any = getattr(module, f"{attribute}_bias") if module.has_bias else None
        kernels = form.experts(
            (
                weights.quantized_expert(
                    name, number, rows, columns[0], is_transposed=module.is_transposed
                )
                for run in numbers
                for number in run
            ),
            None if bias is None else bias.data,
        )
        if kernels is None:
            return False
        weights.drop(name)
        set_kernels(module, attribute, kernels)
        return True

    def _keep(self, model: Any, name: str, value: Tensor) -> None:
        """Put this rank's part of a parameter or a buffer into the model."""
        owner, _, attribute = name.rpartition(".")
        module, cut = model.get_submodule(owner), self._cuts.get(name)
        if cut is not None:
            ranges = cut.ranges(self.parallel.tp_size, self.parallel.tp_rank)
            value = take_ranges(value.data, cut.dim, ranges)
        elif attribute == "bias" and self.parallel.tp_rank > 0 and self.is_row(owner):
            module.bias = None  # added once, not once per rank
            return
        for dim, ranges in self._pieces.get(name, ()):
            value = take_ranges(value.data, dim, ranges)
        if name in self._zeros:
            value = torch.zeros_like(value)  # added once, not once per rank
        if attribute in module._parameters and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, False)
        value._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(module, attribute, value)


class AbsentLayer(nn.Module):
    """In place of a decoder layer of another stage: gives the hidden states in hand."""

    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        """The decoder may read plain attributes of its layers, such as a kind of attention."""
        super().__init__()
        self._returns_tuple = returns_tuple
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, nn.Module | Tensor):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        step: Any = self.manta_step
        return (step.hidden,) if self._returns_tuple else step.hidden


class NoEmbedding(nn.Module):
    """In place of an embedding on a later stage, where nothing of its result is used."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.size, self.weight = embedding.embedding_dim, _no_weight()
        self.padding_idx = getattr(embedding, "padding_idx", None)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        step: Any = self.manta_step
        zeros: Tensor = step.hidden.new_zeros((*ids.shape, self.size))
        return zeros


class NoHead(nn.Module):
    """In place of the output head, on all stages but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _no_weight()


def _is_of_experts(model: Any, name: str) -> bool:
    """Whether it is the matrices of a mixture."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    return is_experts(module) and attribute in ("gate_up_proj", "up_proj", "down_proj")


def _runs(numbers: list[int]) -> list[range]:
    """Ascending numbers as ranges without gaps."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _no_weight() -> Tensor:
    """What stands where a model's code looks for a weight, to give it its first numbers."""
    nothing = torch.empty(0)
    nothing._is_hf_initialized = True  # type: ignore[attr-defined]
    return nothing


def _clear_padding(model: Any, name: str, table: nn.Parameter) -> None:
    """Do to a table that several modules share what the code of some models does to a loaded
    embedding: the row of its padding token becomes 0."""
    module = model.get_submodule(name.rpartition(".")[0])
    padding = getattr(module, "padding_idx", None)
    if padding is not None and table.ndim == 2:
        size, width = table.shape
        with torch.device("meta"):
            embedding = nn.Embedding(size, width, padding)
        embedding.weight = table
        with guard_torch_init_functions(), torch.no_grad():
            model._init_weights(embedding)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever the model has `old`."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if child is old:
                setattr(owner, name, new)
