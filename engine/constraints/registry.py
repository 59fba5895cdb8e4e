"""The constraints by the kind that a `ConstraintSpec` names."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from engine.constraints.base import Constraint, ConstraintKind, ConstraintSpec
from engine.constraints.grammar import Grammar
from engine.constraints.token_choice import TokenChoice
from engine.errors import RequestError
from engine.registry import Registry

if TYPE_CHECKING:
    from engine.constraints.grammar_compiler import GrammarCompiler

CONSTRAINTS: Registry[type[ConstraintKind]] = Registry(
    "constraint.kind",
    {"token_choice": TokenChoice, "grammar": Grammar},
    partial(RequestError, param="constraint"),
)


def verify_constraint(spec: ConstraintSpec, vocab_size: int) -> None:
    """Raise `RequestError` if the kind is unknown or its payload is wrong. Cheap."""
    CONSTRAINTS[spec.kind].verify(spec.payload, vocab_size)


def create_constraint(
    spec: ConstraintSpec,
    vocab_size: int,
    eos_token_ids: Collection[int],
    grammars: GrammarCompiler | None = None,
) -> Constraint:
    """The constraint before the first output token. Raises `RequestError` as `verify_constraint`,
    and if a grammar doesn't compile.

    `eos_token_ids`: tokens that end the request; `grammars`: see `Constraint.create`.
    """
    return CONSTRAINTS[spec.kind].create(spec.payload, vocab_size, eos_token_ids, grammars)
