"""Follows one forward of a model of transformers, and prints its `ModelLayout` as JSON.

python -m engine.models.recording FOLDER
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from engine.checkpoint.layout import AttentionCall, ModelLayout
from engine.errors import ConfigError
from engine.models.cuts import find_cuts
from engine.models.flow import Flow, layer_tag
from engine.models.gathered_recording import record_gathered
from engine.models.interfaces import point_at
from engine.models.latents import latent_calls
from engine.models.shape import ModelShape, decoder_layers
from engine.models.state_recording import record_states

MAX_LAYERS = 2000
NUM_TOKENS = 24
FAR = 1 << 17
"""A position so far behind that every window ends before it."""
_KNOWN = frozenset(
    ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache",
     "output_attentions", "output_hidden_states", "return_dict", "is_causal", "cache_position",
     "output_router_logits", "logits_to_keep", "num_items_in_batch", "position_embeddings")
)  # fmt: skip
_LAYERS = frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"))
_NAME = "manta_recording"
_CAUSAL: Any = AutoModelForCausalLM
_LOGGING: Any = logging
_DispatchMode: Any = TorchDispatchMode

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Recorder:
    """Attention and mask functions that note what they are asked, and compute nothing."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, flow: Flow | None) -> None:
        """Forget what was noted; a forward that `flow` follows begins."""
        self.flow = flow
        self.calls: list[AttentionCall] = []
        self._stored: list[tuple[Tensor, Tensor]] = []

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """What a layer calls: `q` [1, heads, T, k_dim], `k` and `v` [1, kv heads, T, ...]."""
        assert self.flow is not None
        rule = getattr(attention_mask, "manta_rule", None)
        unknown = [name for name in kwargs if name not in _KNOWN and kwargs[name] is not None]
        window = chunk = None
        if rule is not None:
            kind, size = classify(_of_one_sequence(rule))
            window = size if kind == "sliding" else None
            chunk = size if kind == "chunked" else None
            if kind == "other":
                unknown.append("a mask of its own")
        elif attention_mask is not None:
            unknown.append("a mask of its own")
        scale = kwargs.get("scaling")
        self.calls.append(
            AttentionCall(
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                k_dim=k.shape[-1],
                v_dim=v.shape[-1],
                scale=float(scale) if scale is not None else q.shape[-1] ** -0.5,
                window=window,
                chunk=chunk,
                softcap=kwargs.get("softcap"),
                has_sinks=kwargs.get("s_aux") is not None,
                kv_of=self._same(k, v),
                unknown=tuple(sorted(unknown)),
            )
        )
        self._stored.append((k, v))
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        return self.flow.attention(module, q, k, v, out), None

    def _same(self, k: Tensor, v: Tensor) -> int | None:
        """The first call that had this very keys and values."""
        pairs = enumerate(self._stored)
        return next((i for i, (key, value) in pairs if key is k and value is v), None)

    @staticmethod
    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Rule | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A mask that carries its rule to the layers that get it."""
        mask = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool)
        mask.manta_rule = mask_function  # type: ignore[attr-defined]
        return mask


def classify(rule: Rule) -> tuple[str, int | None]:
    """What a mask's rule means: ("causal", None), ("sliding", tokens), ("chunked", tokens), or
    ("other", None). It is asked about some positions only."""

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(rule(zero, zero, torch.tensor(query), torch.tensor(key)))

    for kind, size in _guesses(sees):
        if all(sees(*pair) == _is_seen(kind, size, *pair) for pair in _pairs(size or 0)):
            return kind, size
    return "other", None


def _of_one_sequence(x: Any) -> Any:
    """A rule whose tensors have numbers. Those of sequences, such as how much one is padded, are 0;
    those of tokens, such as which picture one belongs to, are -1: to none."""
    if isinstance(x, Tensor) and x.is_meta:
        if NUM_TOKENS not in x.shape:
            return torch.zeros(x.shape, dtype=x.dtype)
        shape = [4 * FAR if size == NUM_TOKENS else size for size in x.shape]
        return torch.full((1,) * len(shape), -1).to(x.dtype).expand(shape)
    if isinstance(x, tuple | list):
        return type(x)(map(_of_one_sequence, x))
    if isinstance(x, FunctionType) and x.__closure__:
        cells = tuple(CellType(_of_one_sequence(cell.cell_contents)) for cell in x.__closure__)
        return FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
    return x


def _guesses(sees: Callable[[int, int], bool]) -> Iterator[tuple[str, int | None]]:
    yield "causal", None
    low, high = 0, FAR  # a distance that is seen, and one that isn't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sees(FAR, FAR - middle) else (low, middle)
    yield "sliding", high
    start = FAR - low  # of the chunk, if it is one
    for size in range(low + 1, FAR):
        if start % size == 0:
            yield "chunked", size


def _is_seen(kind: str, size: int | None, query: int, key: int) -> bool:
    if key > query or size is None:
        return key <= query
    return key > query - size if kind == "sliding" else key // size == query // size


def _pairs(size: int) -> list[tuple[int, int]]:
    """Positions (query, key) at which the kinds differ, and some between."""
    edges = [n + d for n in (0, size, 2 * size, FAR) for d in (0, 1, 2, 3, size // 2)]
    steps = (0, 1, 2, 3, 7, size // 3, size // 2, size - 1, size, size + 1, 3 * size + 2)
    pairs = [(query, query - step) for query in edges for step in steps if 0 <= step <= query]
    return [*pairs, (3, 5), (FAR, 0), (FAR, FAR // 2), (FAR - 1, FAR)]


def record(folder: Path) -> ModelLayout:
    """The layout of a model folder. Raises `ConfigError`."""
    config = _config(folder)
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise ConfigError(f"{folder} holds half of a '{config.model_type}', which has an encoder.")
    _check_layers(folder, {"num_hidden_layers": getattr(text, "num_hidden_layers", 0)})
    keys = ("max_position_embeddings", "max_target_positions")
    positions = next((value for key in keys if (value := getattr(text, key, None))), 1 << 17)
    if positions < 1:
        raise ConfigError(
            f"{folder}/config.json names {positions} positions; 1 or more are needed."
        )
    try:
        with torch.device("meta"):
            model = _CAUSAL.from_config(config, trust_remote_code=False)
    except Exception as error:  # the code of any model
        raise ConfigError(
            f"transformers can't build the model of {folder}/config.json: {error}"
        ) from error
    recorder = Recorder()
    ALL_ATTENTION_FUNCTIONS.register(_NAME, recorder.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, recorder.mask)
    ALL_EXPERTS_FUNCTIONS.register(_NAME, lambda module, hidden, *more: torch.zeros_like(hidden))
    point_at(model, _NAME)
    called: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    gathered: list[AttentionCall] = []
    try:
        flow = _run(model, recorder)
    except ConfigError:
        gathered, called = record_gathered(config)
        if not gathered:
            raise
    else:
        if not recorder.calls:
            gathered, names = record_gathered(config)
            called = names if gathered else called
    eos = getattr(text, "eos_token_id", None)
    common: dict[str, Any] = dict(
        class_name=type(model).__name__,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=int(positions) - _unused_positions(model, int(positions)),
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        read=tuple(_read(model, called)),
    )
    if gathered:
        return _whole(model, gathered, common)
    with torch.inference_mode():
        cuts = find_cuts(model, flow, recorder.calls)
        found = latent_calls(model, flow, recorder.calls) or recorder.calls
    shape = ModelShape.of(model, flow)
    calls = zip(found, shape.layer_of_call, cuts.divided, strict=True)
    return ModelLayout(
        **common,
        calls=tuple(
            msgspec.structs.replace(call, layer=layer, is_divided=is_divided)
            for call, layer, is_divided in calls
        ),
        layers=shape.layers,
        layer_parameters=shape.layer_parameters,
        embeddings=tuple(dict.fromkeys(flow.embeddings)),
        embedding_parameters=shape.embedding_parameters,
        head=shape.head,
        head_parameters=shape.head_parameters,
        is_tied=shape.is_tied,
        other_parameters=shape.other_parameters,
        cuts=tuple(cuts.cuts),
        mixtures=tuple(cuts.mixtures),
        local_modules=tuple(cuts.local_modules),
        not_staged=_why_not_staged(flow, len(shape.layer_parameters)),
        layers_return_tuples=any(layer.returns_tuple for layer in flow.layer_flows),
        states=record_states(model),  # last: it changes the model
    )


def _whole(model: nn.Module, calls: list[AttentionCall], common: dict[str, Any]) -> ModelLayout:
    """The layout of a model that one rank has whole."""
    return ModelLayout(
        **common,
        calls=tuple(calls),
        layers="",
        layer_parameters=(0,) * len(calls),
        embeddings=(),
        embedding_parameters=0,
        head="",
        head_parameters=0,
        is_tied=False,
        other_parameters=sum(parameter.numel() for parameter in model.parameters()),
        cuts=(),
        mixtures=(),
        not_staged="its attention is its own code",
        states=(),
    )


def _unused_positions(model: Any, positions: int) -> int:
    """The first rows of a table of positions that stand for none: some tables have a padding row,
    and positions begin behind it."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    for table in tables:
        is_words = table is model.get_input_embeddings()
        if table.num_embeddings == positions and table.padding_idx is not None and not is_words:
            return table.padding_idx + 1
    return 0


def _read(model: nn.Module, called: set[str]) -> Iterator[str]:
    """Linears that aren't called though what they are part of is: its code reads their weights."""
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, nn.Linear) and name not in called and parent in called:
            yield name


def _config(folder: Path) -> Any:
    values = json.loads((folder / "config.json").read_bytes())
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        named = values.get("architectures") or ["(none named)"]
        own = " It wants to run its own code ('auto_map'), which Manta never does."
        raise ConfigError(
            f"architecture {named[0]} of {folder} is not supported: transformers "
            f"{transformers.__version__} doesn't know model_type '{kind}'."
            f"{own if 'auto_map' in values else ''}"
        )
    _check_layers(folder, values)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # what transformers raises for odd files has no common class
        raise ConfigError(f"transformers can't read {folder}/config.json: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{folder} holds a model of type '{config.model_type}', which generates no text."
        )
    return config


class _Unknown(_DispatchMode):  # type: ignore[misc]
    """Answers what code asks about numbers that `meta` hasn't got: nothing is found, all is 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        on_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if on_meta and func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.long)
        if on_meta and func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            args = (args[0], [_none_found(index) for index in args[1]], *args[2:])
        if on_meta and func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _none_found(index: Tensor | None) -> Tensor | None:
    """An index that picks what a mask without numbers picks: nothing."""
    if index is None or index.dtype != torch.bool:
        return index
    return index.new_empty((0,), dtype=torch.long)


def _check_layers(folder: Path, values: dict[str, Any]) -> None:
    """Raise `ConfigError` for a number of layers that is out of range, in any part of the
    configuration. transformers would make a list of it while it reads."""
    for key, value in values.items():
        if isinstance(value, dict):
            _check_layers(folder, value)
        elif key in _LAYERS and not (isinstance(value, int) and 0 < value <= MAX_LAYERS):
            raise ConfigError(
                f"{folder}/config.json names {value} layers; 1 to {MAX_LAYERS} are allowed."
            )


def _run(model: Any, recorder: Recorder) -> Flow:
    """One forward on `meta`, with the arguments that the model takes."""
    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.long, device="meta")
    known = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if "position_ids" in known:
        given["position_ids"] = torch.arange(NUM_TOKENS)[None].to("meta")
    if "logits_to_keep" in known:
        # A tensor: for a number, 0 included, some models drop hidden states in their last layers.
        given["logits_to_keep"] = torch.arange(NUM_TOKENS, device="meta")
    mask = torch.ones((1, NUM_TOKENS), dtype=torch.long, device="meta")
    layers = decoder_layers(model)
    failure: Exception | None = None
    for more in ({"attention_mask": mask}, {}):
        flow = Flow(model, None if layers is None else layers[1])
        recorder.begin(flow)
        try:
            with torch.no_grad(), flow.follow(), _Unknown():
                model(**given, **more)
            return flow
        except Exception as error:  # the code of any model
            failure = failure or error
    if not getattr(model, "_supports_attention_backend", False) and not recorder.calls:
        return flow  # the layout says what it lacks
    raise ConfigError(
        f"the forward of {type(model).__name__} can't be followed ({type(failure).__name__}: "
        f"{failure}); it isn't supported yet."
    ) from failure


def _why_not_staged(flow: Flow, num_layers: int) -> str:
    """Why the layers can't be divided over pipeline stages, which pass hidden states on; "" if
    they can."""
    found = flow.layer_flows
    if flow.layers is None:
        return "its layers aren't one list"
    if len(found) != num_layers or not all(layer.hidden for layer in found[1:]):
        return "its layers don't follow one another"
    if any(layer.others for layer in found[1:]):
        return "its layers read more than what the layer before them gave"
    last = {layer_tag(num_layers - 1)}
    behind = {name for name, sources in flow.linears.items() if sources == last}
    if not flow.result <= last | behind:
        return "its result isn't made of its last layer's alone"
    return ""


if __name__ == "__main__":
    _LOGGING.set_verbosity_error()
    try:
        sys.stdout.buffer.write(msgspec.json.encode(record(Path(sys.argv[1]))))
    except ConfigError as error:
        sys.exit(" ".join(str(error).split()))
