"""What of a decoder tensor parallel ranks can divide: found in the flow of one forward, then tried.

A linear whose input is computed from other linears or from attention, elementwise or by head, can
be divided by its inputs if those are divided by their outputs. What lies between is code of any
model. So each way to divide is tried on thin matrices, of small rank but of the real sizes: the sum
of what ranks compute has to be what the whole computes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.checkpoint.layout import AttentionCall, Cut, MixtureCut, Part
from engine.layers.experts import is_experts
from engine.models.flow import Call, Flow, Inputs
from engine.models.interfaces import point_at
from engine.models.mixture_cuts import mixture_cut

NAME = "manta_trial"
RANK = 4
"""Of the thin matrices."""
MAX_NUMEL = 1 << 24
"""Numbers of a block's parameters besides its linears; more aren't tried."""
MAX_TRIED = 1 << 18
"""Inputs or outputs of a linear. With more in one of a model's nothing is tried, so that a
configuration can't ask for any amount of memory."""
MAX_RANKS = 64
TOLERANCE = 1e-4
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")

Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Plan:
    """Of a block: the parts of linears' outputs and of other parameters' first dimension, by name
    within the block. The inputs of `row` are divided as `row_part` says."""

    row: str
    row_part: Part
    columns: dict[str, Parts]
    parameters: dict[str, Parts]
    local: str | None
    """The module whose numbers of heads must be those of the rank; None: no module's."""


class Found:
    """The cuts of a model, and for each attention call whether its heads are divided."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self.mixtures: list[MixtureCut] = []
        self.local_modules: list[str] = []
        self.divided: list[bool] = []

    def add(self, model: nn.Module, block: str, plan: Plan) -> None:
        """Note what `plan` divides of the module `block`."""
        prefix = f"{block}." if block else ""
        row = model.get_submodule(prefix + plan.row)
        self._cut(row, "weight", prefix + plan.row, 1, (plan.row_part,))
        for name, parts in plan.columns.items():
            linear = model.get_submodule(prefix + name)
            self._cut(linear, "weight", prefix + name, 0, parts)
            if linear.bias is not None:
                self._cut(linear, "bias", prefix + name, 0, parts)
        for name, parts in plan.parameters.items():
            owner, _, attribute = (prefix + name).rpartition(".")
            self._cut(model.get_submodule(owner), attribute, owner, 0, parts)
        if plan.local is not None:
            self.local_modules.append((prefix + plan.local).rstrip("."))

    def _cut(self, module: nn.Module, attribute: str, name: str, dim: int, parts: Parts) -> None:
        numel = getattr(module, attribute).numel()
        self.cuts.append(Cut(f"{name}.{attribute}", dim, parts, numel))


def find_cuts(model: nn.Module, flow: Flow, calls: list[AttentionCall]) -> Found:
    """What can be divided of `model`, whose forward `flow` has followed. `calls` are its attention
    calls, as they were recorded."""
    found = Found()
    if _largest(model, flow) > MAX_TRIED:
        found.divided = [False] * len(calls)
        return found
    tried: dict[Any, Plan | None] = {}
    per_module = [call.module for call in flow.calls]
    for call, sizes in zip(flow.calls, calls, strict=True):
        plan = None
        if per_module.count(call.module) == 1:
            sizes = msgspec.structs.replace(sizes, is_divided=True)
            rows = [name for name, sources in flow.linears.items() if call.tag in sources]
            block = _common(f"{call.module}.", *rows)
            ways = _attention_ways(model, flow, call, sizes, rows, block)
            plan = _first_right(model, flow, block, ways, sizes, tried)
        found.divided.append(plan is not None)
        if plan is not None:
            found.add(model, block, plan)
    taken = {cut.name.rpartition(".")[0] for cut in found.cuts}
    for row, sources in flow.linears.items():
        if row in taken or not sources or sources & taken or not sources <= flow.linears.keys():
            continue
        block = _common(row, *sources)
        plan = _first_right(model, flow, block, _mlp_ways(model, flow, row, block), None, tried)
        if plan is not None:
            found.add(model, block, plan)
            taken |= {row, *sources}
    for name, module in model.named_modules():
        if is_experts(module):
            mixture = mixture_cut(name, module)
            found.mixtures += [] if mixture is None else [mixture]
    return found


def _largest(model: nn.Module, flow: Flow) -> int:
    """The most inputs or outputs that a linear of the forward has, the output head aside."""
    linears = [model.get_submodule(name) for name in flow.linears]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return max((max(x.weight.shape) for x in linears if x is not head), default=0)  # type: ignore


def _attention_ways(
    model: nn.Module,
    flow: Flow,
    call: Call,
    sizes: AttentionCall,
    rows: list[str],
    block: str,
) -> Iterator[Plan]:
    """Ways to divide the heads of an attention call, those that divide most first. `rows`: the
    linears that read its result, with it in the module `block`."""
    inside = f"{block}." if block else ""
    width, heads, kv_heads = sizes.num_heads * sizes.v_dim, sizes.num_heads, sizes.num_kv_heads
    if len(rows) != 1 or _size(model, rows[0])[1] != width:
        return
    gates = flow.linears[rows[0]] - {call.tag}
    if not all(_is_only_for(flow, gate, rows[0]) for gate in gates):
        return
    fixed: dict[str, Parts] = {}
    for gate in gates:
        out = _size(model, gate)[0]
        if not gate.startswith(inside) or out not in (width, heads):
            return
        fixed[gate.removeprefix(inside)] = (Part(out, heads),)
    optional: list[list[tuple[str, Parts] | None]] = []
    for name in sorted((call.q | call.k | call.v) & flow.linears.keys()):
        if not name.startswith(inside) or not _is_only_for(flow, name, call):
            continue
        out = _size(model, name)[0]
        choices = _column_choices(name in call.q, name in call.k, name in call.v, out, sizes)
        optional.append([*((name.removeprefix(inside), parts) for parts in choices), None])
    parameters: dict[str, Parts] = {}
    for name, value in model.get_submodule(block).named_parameters():
        owner = model.get_submodule((inside + name).rpartition(".")[0])
        if type(owner) is not nn.Linear and value.ndim and value.shape[0] in (heads, kv_heads):
            is_kv = value.shape[0] != heads
            parameters[name] = (Part(value.shape[0], value.shape[0], is_shared=is_kv),)
    ways = sorted(itertools.product(*optional), key=lambda way: way.count(None))
    row = rows[0].removeprefix(inside)
    for way in ways:
        columns = fixed | dict(choice for choice in way if choice is not None)
        for some in _subsets(parameters):
            for local in (None, call.module[len(inside) :]):
                yield Plan(row, Part(width, heads), columns, some, local)


def _column_choices(
    is_q: bool, is_k: bool, is_v: bool, out: int, sizes: AttentionCall
) -> list[Parts]:
    """How the outputs of a linear that queries, keys or values come from can be divided."""
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    keys = Part(kv_heads * sizes.k_dim, kv_heads, is_shared=True)
    values = Part(kv_heads * sizes.v_dim, kv_heads, is_shared=True)
    sides: Parts = ()
    if is_q:
        sides += (Part(heads * sizes.k_dim, heads),)
    if is_k:
        sides += (keys,)
    if is_v:
        sides += (values,)
    found = []
    if sum(part.size for part in sides) == out:
        found.append(sides)
    units = heads if is_q and not is_k and not is_v else kv_heads
    together = (Part(out, units, is_shared=not is_q),)
    if out % units == 0 and together not in found:
        found.append(together)
    return found


def _mlp_ways(model: nn.Module, flow: Flow, row: str, block: str) -> Iterator[Plan]:
    """Ways to divide a linear by its inputs, which come from other linears."""
    prefix = f"{block}." if block else ""
    size = _size(model, row)[1]
    choices: list[list[tuple[str, Parts]]] = []
    for name in sorted(flow.linears[row]):
        if not _is_only_for(flow, name, row):
            return
        out = _size(model, name)[0]
        half = Part(size, size)
        known: dict[int, list[Parts]] = {
            size: [(half,)],
            2 * size: [(half, half), (Part(2 * size, size),)],
        }
        choices.append([(name.removeprefix(prefix), parts) for parts in known.get(out, [])])
    for way in itertools.product(*choices):
        yield Plan(row.removeprefix(prefix), Part(size, size), dict(way), {}, None)


def _first_right(
    model: nn.Module,
    flow: Flow,
    block: str,
    ways: Iterator[Plan],
    sizes: AttentionCall | None,
    tried: dict[Any, Plan | None],
) -> Plan | None:
    """The first of `ways` that gives the right numbers, as for other blocks of the kind."""
    module, inputs = model.get_submodule(block), flow.inputs.get(block)
    first = next(ways, None)
    if first is None or inputs is None or any(flow.times[n] != 1 for n in _names(first, block)):
        return None
    kind = (kind_of(module), first.row, None if sizes is None else _heads_of(sizes))
    if kind not in tried:
        trial = Trial(module, inputs, sizes)
        tried[kind] = next((way for way in itertools.chain((first,), ways) if trial(way)), None)
    return tried[kind]


class Trial:
    """Compares ways to divide a block with the whole block, for the numbers of `_trial_ranks`."""

    def __init__(self, module: nn.Module, inputs: Inputs, sizes: AttentionCall | None) -> None:
        self.sizes = sizes
        self.usable = _other_numel(module) <= MAX_NUMEL
        if not self.usable:
            return
        generator = torch.Generator().manual_seed(0)
        self.inputs = tree_map(lambda x: _real(x, generator), (inputs.args, inputs.kwargs))
        self.whole = copy.deepcopy(module)
        point_at(self.whole, NAME)
        for name, child in list(self.whole.named_modules()):
            if type(child) is nn.Linear:
                owner, _, attribute = name.rpartition(".")
                thin = Thin(child.out_features, child.in_features, child.bias is not None)
                thin.fill(generator)
                setattr(self.whole.get_submodule(owner), attribute, thin)
        for child in self.whole.modules():
            for name, value in child.named_parameters(recurse=False):
                if value.device.type == "meta":
                    setattr(child, name, nn.Parameter(_real(value, generator), False))
            for name, buffer in child.named_buffers(recurse=False):
                if buffer.device.type == "meta":
                    setattr(child, name, _real(buffer, generator))

    def __call__(self, plan: Plan) -> bool:
        """Whether the ranks' results add up to those of the whole block."""
        counts = list(_trial_ranks(plan, self.sizes))
        if not self.usable or not counts:
            return False
        try:
            wanted = self._row_result(self.whole, plan, 1, 0)
            for count in counts:
                parts = [
                    self._row_result(divided(self.whole, plan, self.sizes, count, rank), plan,
                                     count, rank)
                    for rank in range(count)
                ]  # fmt: skip
                error = (sum(parts) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)
                if not float(error) <= TOLERANCE:
                    return False
        except Exception:  # the code of any model, called in a way that it may not be made for
            return False
        return True

    def _row_result(self, block: nn.Module, plan: Plan, count: int, rank: int) -> Tensor:
        """What the row linear gives in a forward of the block."""
        seen: list[Tensor] = []
        row = block.get_submodule(plan.row)
        handle = row.register_forward_hook(lambda module, args, out: seen.append(out))
        args, kwargs = self.inputs
        step = TrialStep(self.sizes, count, rank)
        for module in block.modules():
            module.manta_trial = step  # type: ignore[assignment]
        try:
            block(*args, **kwargs)
        finally:
            handle.remove()
        (found,) = seen
        return found


@dataclass
class TrialStep:
    """What attention needs to know while a block is tried."""

    sizes: AttentionCall | None
    count: int
    rank: int


def trial_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Something of each token's own query, key and value, and of its head's sink."""
    step: TrialStep = module.manta_trial  # type: ignore[assignment]
    if step.sizes is not None:
        local = step.sizes.on_rank(step.count)
        q = own_heads(q, local.num_heads, step.count, step.rank)
        k, v = (own_heads(x, local.num_kv_heads, step.count, step.rank) for x in (k, v))
    copies = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(copies, 1) for x in (k, v))
    share = torch.tanh((q * keys).sum(-1, keepdim=True))
    if kwargs.get("s_aux") is not None:
        share = share + kwargs["s_aux"].reshape(1, -1, 1, 1)
    return (values * share).transpose(1, 2).contiguous(), None


def own_heads(x: Tensor, count: int, tp_size: int, tp_rank: int) -> Tensor:
    """Those `count` of all heads in dimension 1 that a rank has; `x` itself if it has no others."""
    if x.shape[1] == count:
        return x
    copies = tp_size * count // x.shape[1]
    return x.narrow(1, tp_rank // copies * count, count)


ALL_ATTENTION_FUNCTIONS.register(NAME, trial_attention)


class Thin(nn.Module):
    """A linear [out, in] whose matrix is a product of two thin ones."""

    def __init__(self, out_features: int, in_features: int, bias: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.left = nn.Parameter(torch.empty(out_features, RANK), False)
        self.right = nn.Parameter(torch.empty(RANK, in_features), False)
        self.bias = nn.Parameter(torch.empty(out_features), False) if bias else None

    def fill(self, generator: torch.Generator) -> None:
        """Random numbers, which keep the size of their inputs."""
        self.left.normal_(0, RANK**-0.5, generator=generator)
        self.right.normal_(0, self.in_features**-0.5, generator=generator)
        if self.bias is not None:
            self.bias.normal_(generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out = (x @ self.right.t()) @ self.left.t()
        return out if self.bias is None else out + self.bias


def divided(
    whole: nn.Module, plan: Plan, sizes: AttentionCall | None, count: int, rank: int
) -> nn.Module:
    """One rank's share of a block of thin linears."""
    block = copy.deepcopy(whole)

    def take(value: Tensor, parts: Parts, dim: int) -> nn.Parameter:
        ranges = Cut("", dim, parts, value.numel()).ranges(count, rank)
        return nn.Parameter(take_ranges(value.data, dim, ranges), False)

    for name, parts in plan.columns.items():
        thin: Any = block.get_submodule(name)
        thin.left = take(thin.left, parts, 0)
        if thin.bias is not None:
            thin.bias = take(thin.bias, parts, 0)
    row: Any = block.get_submodule(plan.row)
    row.right = take(row.right, (plan.row_part,), 1)
    if rank:
        row.bias = None
    for name, parts in plan.parameters.items():
        owner, _, attribute = name.rpartition(".")
        module = block.get_submodule(owner)
        setattr(module, attribute, take(getattr(module, attribute), parts, 0))
    if plan.local is not None and sizes is not None:
        localize(block.get_submodule(plan.local), sizes, count)
    return block


def take_ranges(value: Tensor, dim: int, ranges: list[range]) -> Tensor:
    """These pieces of `value` along `dim`, side by side, in memory of their own."""
    parts = [value.narrow(dim, part.start, len(part)) for part in ranges]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(
        memory_format=torch.contiguous_format
    )  # fmt: skip


def localize(block: nn.Module, call: AttentionCall, tp_size: int) -> None:
    """Let a block's numbers of heads, and those of a copy of its configuration, be a rank's."""
    local = call.on_rank(tp_size)
    numbers = dict.fromkeys(_HEADS, (call.num_heads, local.num_heads))
    numbers |= dict.fromkeys(_KV_HEADS, (call.num_kv_heads, local.num_kv_heads))
    config = getattr(block, "config", None)
    if config is not None:
        block.config = config = copy.deepcopy(config)
    for owner in (block, config):
        for name, (whole, mine) in numbers.items():
            if getattr(owner, name, None) == whole:
                setattr(owner, name, mine)


def _trial_ranks(plan: Plan, sizes: AttentionCall | None) -> Iterator[int]:
    """Small numbers of ranks that can divide a block; with and without shared heads."""
    parts = [plan.row_part, *itertools.chain(*plan.columns.values(), *plan.parameters.values())]
    most = min(plan.row_part.units, MAX_RANKS)
    fit = (n for n in range(2, most + 1) if all(part.divides(n) for part in parts))
    kv_heads = 0 if sizes is None else sizes.num_kv_heads
    has_few, has_many = False, False
    for count in fit:
        is_many = count > kv_heads
        if sizes is not None and sizes.num_kv_heads % count and count % sizes.num_kv_heads:
            continue
        if has_many if is_many else has_few:
            continue
        has_few, has_many = has_few or not is_many, has_many or is_many
        yield count


def _real(x: Any, generator: torch.Generator) -> Any:
    """A tensor with numbers in place of one on `meta`; anything else as it is."""
    if not isinstance(x, Tensor) or x.device.type != "meta":
        return x
    if x.is_floating_point():
        return torch.randn(x.shape, generator=generator, dtype=torch.float32)
    return torch.arange(prod(x.shape)).view(x.shape).to(x.dtype)


def _is_only_for(flow: Flow, name: str, user: str | Call) -> bool:
    """Whether nothing but `user` is computed from what the linear `name` gives."""
    linears = {other for other, found in flow.linears.items() if name in found}
    calls = {call.tag for call in flow.calls if name in call.q | call.k | call.v}
    layers = any(name in layer.made_of for layer in flow.layer_flows)
    wanted = {user.tag} if isinstance(user, Call) else {user}
    return linears | calls == wanted and not layers and name not in flow.result


def kind_of(module: nn.Module) -> Any:
    """What is the same for blocks that are computed alike."""
    shapes = tuple((name, tuple(value.shape)) for name, value in module.named_parameters())
    plain = tuple(
        sorted(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, int | float | str) and not name.startswith(("layer_", "manta"))
        )
    )
    return type(module), shapes, plain


def _heads_of(sizes: AttentionCall) -> tuple[int, ...]:
    return sizes.num_heads, sizes.num_kv_heads, sizes.k_dim, sizes.v_dim


def _names(plan: Plan, block: str) -> list[str]:
    """Full names of the linears of a plan."""
    prefix = f"{block}." if block else ""
    return [prefix + name for name in (plan.row, *plan.columns)]


def _size(model: nn.Module, linear: str) -> tuple[int, int]:
    found: Any = model.get_submodule(linear)
    return found.out_features, found.in_features


def _other_numel(module: nn.Module) -> int:
    """Numbers of a module's parameters and buffers that aren't of linears."""
    others = [child for child in module.modules() if type(child) is not nn.Linear]
    return sum(
        value.numel()
        for child in others
        for value in itertools.chain(child.parameters(recurse=False), child.buffers(recurse=False))
    )


def _common(*names: str) -> str:
    """The innermost module that holds all of these modules."""
    found = []
    for pieces in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(pieces)) > 1:
            break
        found.append(pieces[0])
    return ".".join(found)


def _subsets(parameters: dict[str, Parts]) -> Iterator[dict[str, Parts]]:
    """All of the parameters, none, and what lies between if there are few."""
    names = list(parameters)
    if len(names) > 3:
        yield parameters
        yield {}
        return
    for count in range(len(names), -1, -1):
        for some in itertools.combinations(names, count):
            yield {name: parameters[name] for name in some}
