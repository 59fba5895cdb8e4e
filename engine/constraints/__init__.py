"""Constrained decoding: what a request may output, token by token."""

from __future__ import annotations

from engine.constraints.all_of import AllOf
from engine.constraints.base import Constraint, ConstraintSpec, MaskArray, allow_tokens, mask_words
from engine.constraints.registry import create_constraint, verify_constraint
from engine.constraints.token_filter import TokenFilter

__all__ = [
    "AllOf",
    "Constraint",
    "ConstraintSpec",
    "MaskArray",
    "TokenFilter",
    "allow_tokens",
    "create_constraint",
    "mask_words",
    "verify_constraint",
]
