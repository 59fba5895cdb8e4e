"""`Latents`: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over the latents alone.

Such a module makes one short vector of each token, its latent, and a key that is rotated, which all
heads share. `expand_kv`, as transformers calls it, makes the keys and values of all heads of them,
by a matrix. A query can be multiplied by this matrix instead, and the result of attention behind
it: then latents are all that a cache keeps, as the keys of one head. Values are a part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.checkpoint.layout import AttentionCall, HeadSizes
from engine.models.cuts import TOLERANCE, Trial, kind_of, own_heads
from engine.models.flow import Flow
from engine.models.interfaces import point_at
from engine.models.share import replace_module

_NAME = "manta_latents_trial"
_ATTRIBUTE = "manta_latents"
_EXPAND = "expand_kv"
MAX_NUMEL = 1 << 25
"""Numbers of the keys and values of as many tokens as a latent has numbers; more aren't tried."""


class LatentSizes(NamedTuple):
    """Numbers of a token."""

    latent: int
    rotated: int


class Latents:
    """The matrix of one module, by heads."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """`keys` [heads, dim, latent]: of what isn't rotated of a key. `values` [heads, latent,
        v_dim]."""
        self.keys, self.values = keys, values

    @classmethod
    def of(cls, module: Any, sizes: LatentSizes, like: Tensor) -> Latents | None:
        """What `expand_kv` computes with, as its results show, of the type of `like`; None if it
        does something else than to multiply latents and to hand the rotated key on."""

        def expand(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
            given = (x[None, None].to(like) for x in (latent, rotated))
            keys, values = module.expand_kv(*given)
            return keys[0], values[0]

        none, some = torch.zeros(sizes.latent, sizes.rotated), torch.eye(sizes.rotated)
        keys, values = expand(torch.eye(sizes.latent), none)
        kept, zeros = expand(torch.zeros(sizes.rotated, sizes.latent), some)
        dim = keys.shape[-1] - sizes.rotated
        wanted = F.pad(some, (dim, 0)).to(like).expand_as(kept)
        if keys[..., dim:].any() or zeros.any() or not torch.equal(kept, wanted):
            return None
        return cls(keys[..., :dim].transpose(1, 2).contiguous(), values.contiguous())

    def on_rank(self, num_heads: int, tp_size: int, tp_rank: int) -> Latents:
        """Of the `num_heads` heads of a rank."""
        parts = (own_heads(x[None], num_heads, tp_size, tp_rank) for x in (self.keys, self.values))
        return Latents(*(part[0].contiguous() for part in parts))

    def queries(self, q: Tensor) -> Tensor:
        """[T, heads, dim + rotated] -> [T, heads, latent + rotated]: for keys that are latents."""
        dim, latent = self.keys.shape[1:]
        rotated = q.shape[2] - dim
        out = q.new_empty((*q.shape[:2], latent + rotated))
        out[..., latent:] = q[..., dim:]
        out[..., :latent] = torch.bmm(q[..., :dim].transpose(0, 1), self.keys).transpose(0, 1)
        return out

    def results(self, x: Tensor) -> Tensor:
        """[T, heads, latent], sums of latents -> [T, heads, v_dim], those of values."""
        return torch.bmm(x.transpose(0, 1), self.values).transpose(0, 1)


def use_latents(module: Any, latents: Latents) -> None:
    """Let the attention function that a module calls get latents and rotated keys in one, as keys,
    and latents as values, [n, 1, L, ...]; and `latents`, to make use of them."""
    module.manta_latents = latents
    module.expand_kv = lambda latent, rotated: (torch.cat((latent, rotated), -1), latent)


def latents_of(module: nn.Module) -> Latents | None:
    """What `use_latents` has given to a module."""
    return getattr(module, _ATTRIBUTE, None)


def load_latents(
    model: nn.Module, call: AttentionCall, like: Tensor, tp_size: int, tp_rank: int
) -> None:
    """Let all modules of `model` use latents, with the heads of a rank. `call` is one of theirs,
    and they have been tried when it was recorded."""
    sizes = LatentSizes(call.v_dim, call.k_dim - call.v_dim)
    for module in list(model.modules()):
        if hasattr(module, _EXPAND):
            with _called_parts(module) as parts:
                latents = Latents.of(module, sizes, like)
            assert latents is not None
            use_latents(module, latents.on_rank(call.num_heads, tp_size, tp_rank))
            for part in parts:
                if hasattr(part, "in_features"):
                    replace_module(module, part, Absorbed(part))


class Absorbed(nn.Module):
    """In place of a linear whose matrix is kept as `Latents` alone."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        """For code that looks at its type or shape."""


@contextmanager
def _called_parts(module: nn.Module) -> Iterator[set[nn.Module]]:
    """The parts of a module that are called meanwhile."""
    found: set[nn.Module] = set()
    handles = [
        part.register_forward_pre_hook(lambda part, args: found.add(part))
        for part in module.modules()
        if part is not module
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def latent_calls(
    model: nn.Module, flow: Flow, calls: list[AttentionCall]
) -> list[AttentionCall] | None:
    """`calls`, as a forward that `flow` has followed makes them, over latents where modules expand
    them. None if that gives other numbers for one of them, or if none does that."""
    tried: dict[Any, LatentSizes | None] = {}
    found = []
    for made, call in zip(flow.calls, calls, strict=True):
        module = model.get_submodule(made.module)
        if not hasattr(module, _EXPAND):
            found.append(call)
            continue
        kind = kind_of(module)
        if kind not in tried:
            tried[kind] = _sizes(module, flow, made.module, call)
        sizes = tried[kind]
        if sizes is None or call.kv_of is not None:
            return None
        found.append(_over_latents(call, sizes))
    return found if tried and len(set(tried.values())) == 1 else None


def _over_latents(call: AttentionCall, sizes: LatentSizes) -> AttentionCall:
    return msgspec.structs.replace(
        call,
        num_kv_heads=1,
        k_dim=sum(sizes),
        v_dim=sizes.latent,
        latent_of=HeadSizes(call.num_kv_heads, call.k_dim, call.v_dim),
    )


def _sizes(module: nn.Module, flow: Flow, name: str, call: AttentionCall) -> LatentSizes | None:
    """The sizes of a module's latents, if it gives the same numbers over them."""
    inputs = flow.inputs.get(name)
    if inputs is None:
        return None
    trial = Trial(module, inputs, None)
    if not trial.usable:
        return None
    whole: Any = trial.whole
    point_at(whole, _NAME)
    args, kwargs = trial.inputs
    expand, given = whole.expand_kv, []

    def watch(latent: Tensor, rotated: Tensor) -> Any:
        given.append((latent.shape, rotated.shape))
        return expand(latent, rotated)

    whole.expand_kv = watch
    try:
        wanted = whole(*args, **kwargs)[0]
        del whole.expand_kv
        ((latent, rotated),) = given
        sizes = LatentSizes(latent[-1], rotated[-1])
        if sizes.latent * call.num_heads * (call.k_dim + call.v_dim) > MAX_NUMEL:
            return None
        with _called_parts(whole) as absorbed:
            latents = Latents.of(whole, sizes, wanted)
        if latents is None:
            return None
        use_latents(whole, latents)
        with _called_parts(whole) as called:
            found = whole(*args, **kwargs)[0]
    except Exception:  # the code of any model, called in a way that it may not be made for
        return None
    if called & absorbed:
        return None
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)
    return sizes if float(error) <= TOLERANCE else None


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of all tokens to all, of [1, heads, L, ...]."""
    latents, scale = latents_of(module), kwargs.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if latents is not None:
        q = latents.queries(q[0].transpose(0, 1)).transpose(0, 1)[None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    return (out if latents is None else latents.results(out[0])[None]), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
