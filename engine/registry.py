"""`Registry`: the words that one configuration key knows, and what each of them stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar

from engine.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps each word of a key to a class or a function, in the order given.

    An entry may be "module:name": it is imported when its word is first looked up. The words can
    then be listed and checked in processes that must not import torch.
    """

    def __init__(
        self,
        key: str,
        entries: Mapping[str, T | str],
        error: Callable[[str], Exception] = ConfigError,
    ) -> None:
        """`error` makes the exception for an unknown word out of the message."""
        self._key = key
        self._entries = dict(entries)
        self._error = error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, word: str) -> T:
        """What `word` stands for. Raises `error`, which names the known words, if it is unknown."""
        entry = self._entries.get(word)
        if entry is None:
            known = ", ".join(self._entries)
            raise self._error(f"{self._key} {word!r} is unknown; choose one of {known}.")
        if not isinstance(entry, str):
            return entry
        module, name = entry.split(":")
        found: T = getattr(import_module(module), name)
        return found
