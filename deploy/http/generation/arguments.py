"""`Arguments`: those of a call in an earlier reply, whoever wrote them."""

# No `from __future__ import annotations`: pydantic reads the annotation.
import json
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from deploy.http.body import FreeObject, refusal, refuse_wide_integers


def as_text(arguments: str | dict[str, Any]) -> str:
    """Arguments as JSON, or as the text that they are."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read(value: Any) -> Any:
    """An object or a text. Other values become JSON text; the tokenizer sees what it holds. So do
    objects with integers that messages between roles can't hold."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return refuse_wide_integers(value)
        except PydanticCustomError:
            pass  # written as text
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise refusal("The arguments are nested too deeply.") from None


Arguments = Annotated[
    str | dict[str, Any], BeforeValidator(_read, json_schema_input_type=str | FreeObject)
]
"""A model may have written broken JSON, or been cut off. That is history: it is passed on to the
model as it is, not refused."""
