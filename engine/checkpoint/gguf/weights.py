"""`stored_weights`: the tensors of a GGUF file under the names that transformers saves them by."""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.checkpoint.gguf.architectures import Architecture, architecture_of
from engine.checkpoint.gguf.checkpoint import GgufCheckpoint
from engine.checkpoint.gguf.header import GgufTensor
from engine.errors import ConfigError

MAX_EXPERTS = 4096
"""Of a layer. The largest models have some hundreds."""


class StoredWeight(NamedTuple):
    """How a weight of transformers is made of a tensor in a file."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    """Of the weight."""
    number: int = 0
    """Which of the weights that lie in the tensor one behind the other."""
    heads: int = 0
    """The rows of so many heads are interleaved: of each head, the two halves of what is rotated
    lie as pairs. 0: rows lie as in transformers."""
    offset: float = 0.0
    """What was added to each number."""


def stored_weights(checkpoint: GgufCheckpoint) -> dict[str, StoredWeight]:
    """All weights of the model by name. Raises `ConfigError` if the architecture isn't known, or a
    tensor has no place in it."""
    architecture = architecture_of(checkpoint.metadata)
    found: dict[str, StoredWeight] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in architecture.read_elsewhere:
            continue
        for weight, stored in _weights_of(architecture, checkpoint, name, tensor):
            found[weight] = stored
    return found


def _weights_of(
    architecture: Architecture, checkpoint: GgufCheckpoint, name: str, tensor: GgufTensor
) -> list[tuple[str, StoredWeight]]:
    layer, leaf, suffix = _parts(name)
    target = (architecture.top if layer is None else architecture.layer).get(leaf)
    has_place = suffix == ".weight" or (layer is not None and leaf in architecture.biases)
    count = checkpoint.metadata.size(f"{architecture.name}.block_count")
    if target is None or not has_place or (layer or 0) >= count:
        raise ConfigError(
            f"{checkpoint.metadata.path} has the tensor {name!r}, which Manta doesn't know of the "
            f"architecture '{architecture.name}'."
        )
    prefix = "" if layer is None else f"model.layers.{layer}."
    place = f"{prefix}{target.name}{suffix}"
    stored = StoredWeight(tensor, tensor.shape)
    if target.heads:
        key = f"{architecture.name}.{target.heads}"
        heads = checkpoint.metadata.optional_size(key) or checkpoint.metadata.size(
            f"{architecture.name}.attention.head_count"
        )
        if tensor.shape[0] % (2 * heads):
            raise ConfigError(
                f"{checkpoint.metadata.path}: {name!r} has {tensor.shape[0]} rows, which {heads} "
                "heads don't divide."
            )
        stored = stored._replace(heads=heads)
    if leaf.endswith("norm"):
        stored = stored._replace(offset=architecture.norm_offset)
    if target.is_row:
        return [(place, stored._replace(shape=(1, *tensor.shape)))]
    if "{}" not in place:
        return [(place, stored)]
    if tensor.shape[0] > MAX_EXPERTS or len(tensor.shape) < 3:
        raise ConfigError(
            f"{checkpoint.metadata.path}: {name!r} has the shape {list(tensor.shape)}, which those "
            "of experts don't have."
        )
    shape = tensor.shape[1:]
    return [
        (place.format(number), stored._replace(number=number, shape=shape))
        for number in range(tensor.shape[0])
    ]


def _parts(name: str) -> tuple[int | None, str, str]:
    """The layer, what the tensor is in it, and ".weight" or ".bias"."""
    leaf, dot, kind = name.rpartition(".")
    block, _, rest = leaf.partition(".")
    number, _, inner = rest.partition(".")
    if block == "blk" and re.fullmatch("[0-9]{1,5}", number):
        return int(number), inner, dot + kind
    return None, leaf, dot + kind
