"""Routing policies by the configuration's word."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

from deploy.routing.policy import Clock, RoutingPolicy
from deploy.routing.prefix_aware import PrefixAwarePolicy
from deploy.routing.prefix_index import PrefixIndex
from deploy.routing.replica_slots import ReplicaSlots
from engine.errors import ConfigError
from engine.registry import Registry


def _unknown(message: str) -> ConfigError:
    return ConfigError(
        f"{message} Or `serve` for Ray Serve's own router, or `module:Class` for a policy of your "
        "own; see docs/routing.md."
    )


ROUTING_POLICIES: Final[Registry[type[RoutingPolicy]]] = Registry(
    "routing_policy", {"prefix_aware": PrefixAwarePolicy}, _unknown
)


def find_policy(word: str) -> type[RoutingPolicy]:
    """The class that `routing_policy` names.

    `word` is one of ROUTING_POLICIES, or `module:Class` for a subclass of `RoutingPolicy` with
    `RoutingPolicy`'s constructor. The module is imported. Raises `ConfigError`, which says why, if
    there is no such policy.
    """
    module, colon, name = word.partition(":")
    if not colon:
        return ROUTING_POLICIES[word]
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's: it may fail in any way
        raise _refusal(word, f"{type(error).__name__}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, RoutingPolicy)):
        raise _refusal(word, f"{name} is no subclass of deploy.routing.RoutingPolicy")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _refusal(word, f"{name} doesn't define {missing}")
    return found


def make_policy(
    word: str, clock: Clock, *, seed: int = 0, sample_every: int = 1, max_pages: int = 4_000_000
) -> RoutingPolicy:
    """A new policy that knows no replica yet.

    `word` is as in `find_policy`. `clock` gives seconds, e.g. `time.monotonic`. `seed` is for
    policies that draw random numbers. `sample_every` and `max_pages` are as in `PrefixIndex`; with
    `sample_every` = max(1, 16 // page_size) the cost of the index doesn't depend on the page size.
    Raises `ConfigError` as `find_policy`.
    """
    policy = find_policy(word)
    slots = ReplicaSlots()
    index = PrefixIndex(slots, max_pages=max_pages, sample_every=sample_every)
    return policy(slots, index, clock, seed)


def _refusal(word: str, reason: str) -> ConfigError:
    return ConfigError(f"routing_policy {word!r} can't be used: {reason}; see docs/routing.md.")
