"""`ConstraintSpec`: a constraint as it travels in messages."""

from __future__ import annotations

from typing import Any

import msgspec


class ConstraintSpec(msgspec.Struct):
    """Names a constraint and holds its details as plain data.

    `kind` is a key of `engine.constraints.registry.CONSTRAINTS`; each kind says in its class what
    `payload` holds.
    """

    kind: str
    payload: dict[str, Any]
    field: str = ""
    """The field of the request that says it, for errors; "" if they name none."""
