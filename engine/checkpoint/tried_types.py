"""`TriedType`: how a type of model fared when a tiny model of it was compared with transformers.

The table is tried_types.json, which `make test-models WRITE=1` writes. docs/models.md shows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError

FILE = Path(__file__).with_name("tried_types.json")


class TriedType(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One `model_type` of config.json."""

    type: str
    class_name: str
    """Of transformers."""
    state: Literal["native", "transformers", "refused", "wrong"]
    """Whose code computed the tokens that transformers generates; or refused; or other tokens."""
    sentence: str = ""
    """Why it is refused, or what differed."""
    reference: Literal["generate", "forward"] = "generate"
    """"forward": the model's own `generate` does something else than its forward, which was
    taken."""
    tp2: str | None = None
    """"": two tensor parallel ranks give the same tokens; else why they are refused; None: not
    tried."""
    pp2: str | None = None
    """The same of two pipeline stages."""
    speculation: str | None = None
    """The same with drafts."""
    embeddings: str | None = None
    """The same of the hidden states that embeddings are made of."""
    int8: str | None = None
    """The same with `quantization: int8`, but for rounding."""
    bfloat16: str | None = None
    """The same with `dtype: bfloat16`, but for rounding."""

    @property
    def runs(self) -> bool:
        return self.state in ("native", "transformers")


class TriedTypes(msgspec.Struct, frozen=True):
    """All that were tried, in alphabetical order, and with which version of transformers."""

    transformers: str
    types: tuple[TriedType, ...]

    def get(self, kind: str) -> TriedType | None:
        """How the type fared; None: it wasn't tried."""
        return next((tried for tried in self.types if tried.type == kind), None)


def model_line(model: ModelConfig) -> str:
    """Whose code computes a model, how its type fared, and what it can't be divided by: a line for
    who serves it."""
    kind = json.loads((model.path / "config.json").read_bytes()).get("model_type")
    table = read_tried_types()
    tried = table.get(kind) if kind else None
    whose = "Manta's own code" if model.layout is None else "the code of transformers"
    words = [f"computed by {whose}"]
    if tried is None:
        words.append(f"type {kind or '(none named)'} is untested")
    elif tried.runs:
        words.append(f"type {kind} is tested against transformers {table.transformers}")
    else:
        fared = "was refused" if tried.state == "refused" else "gave other tokens"
        why = tried.sentence.removesuffix(".")
        words.append(f"type {kind} {fared} when it was tested: {why}")
    refused = [
        key
        for key, sizes in (("tp_size: 2", (2, 1)), ("pp_size: 2", (1, 2)))
        if not _is_divided(model, *sizes)
    ]
    if refused:
        words.append(f"can't be divided by {' or '.join(refused)}")
    return "; ".join(words)


def _is_divided(model: ModelConfig, tp_size: int, pp_size: int) -> bool:
    try:
        model.check_split(tp_size, pp_size)
    except ConfigError:
        return False
    return True


def read_tried_types() -> TriedTypes:
    return msgspec.json.decode(FILE.read_bytes(), type=TriedTypes)


def write_tried_types(tried: TriedTypes) -> None:
    """One line for each type, so that changes are read easily."""
    lines = [msgspec.json.encode(one).decode() for one in sorted(tried.types, key=lambda t: t.type)]
    version = msgspec.json.encode(tried.transformers).decode()
    rows = ",\n".join(lines)
    FILE.write_text(f'{{"transformers": {version}, "types": [\n{rows}\n]}}\n')
