"""`CheckpointFormat`: one method by which checkpoints are quantized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from engine.checkpoint.quantized.headers import TensorHeaders
from engine.checkpoint.quantized.matrices import StoredMatrix
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError


@dataclass(frozen=True)
class CheckpointFormat(ABC):
    """A `quant_method` with what config.json says of it.

    A matrix is quantized if its tensors are: lists of exceptions in config.json aren't asked, and
    plain tensors are read as plain.
    """

    title: str
    """For a person: method and form."""
    notes: tuple[str, ...]
    """What is read in another way than the format means it, in sentences."""

    @classmethod
    @abstractmethod
    def read(cls, title: str, config: ConfigValues) -> Self:
        """Of `config`, the description in config.json. Raises `ConfigError` if it describes
        something that can't be read."""

    @abstractmethod
    def matrix(self, name: str, headers: TensorHeaders) -> StoredMatrix | None:
        """The quantized matrix whose numbers are the tensor `name`; None if that is none.

        Raises `ConfigError` if tensors are missing or don't fit each other.
        """


def refuse(title: str, config: ConfigValues, what: str) -> NoReturn:
    """Raise `ConfigError`: of the method `title`, `what` can't be read."""
    raise refusal(f"{config.path.parent} holds weights quantized with {title}, {what}")


def refusal(what: str) -> ConfigError:
    """The error that says `what` can't be served, and what can."""
    return ConfigError(
        f"{what}: not supported yet. Use the bfloat16 (or float16) checkpoint of the model."
    )


def values(path: Path, given: Mapping[str, Any]) -> ConfigValues:
    """Of a mapping in the file `path`."""
    return ConfigValues(path, given, {})


def group_size(config: ConfigValues, key: str) -> int:
    """Inputs of a group; 0: all inputs of an output. Raises `ConfigError`."""
    value = config.get(key)
    if value is None or value == -1:
        return 0
    return config.size(key)


def refuse_words(title: str, config: ConfigValues, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `ConfigError` for the first key whose value is none of those known."""
    for key, allowed in known.items():
        value = config.get(key)
        word = value.lower() if isinstance(value, str) else value
        if value is not None and word not in allowed:
            refuse(title, config, f"with {key}: {value}")
