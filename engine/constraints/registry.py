"""Constraints by the word of their spec."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from engine.constraints.base import Constraint
from engine.constraints.spec import ConstraintSpec
from engine.constraints.token_choice import TokenChoice
from engine.errors import RequestError

CONSTRAINTS: Mapping[str, type[Constraint]] = MappingProxyType({"token_choice": TokenChoice})


def verify_constraint(spec: ConstraintSpec, vocab_size: int) -> None:
    """Raise `RequestError` if there is no such kind or its payload is wrong. Cheap."""
    _kind(spec).verify(spec.payload, vocab_size)


def create_constraint(
    spec: ConstraintSpec, vocab_size: int, eos_token_ids: Collection[int]
) -> Constraint:
    """The constraint before the first output token. Raises `RequestError` as `verify_constraint`.

    `eos_token_ids`: tokens that end the request, see `Constraint.create`.
    """
    return _kind(spec).create(spec.payload, vocab_size, eos_token_ids)


def _kind(spec: ConstraintSpec) -> type[Constraint]:
    kind = CONSTRAINTS.get(spec.kind)
    if kind is None:
        known = ", ".join(sorted(CONSTRAINTS))
        raise RequestError(
            f"constraint: there is no kind {spec.kind!r}; choose one of: {known}", "constraint"
        )
    return kind
