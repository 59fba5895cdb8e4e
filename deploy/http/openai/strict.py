"""`Strict`: a JSON object of a request body, its types taken literally."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


def refusal(message: str, field: str = "", code: str = "") -> PydanticCustomError:
    """Error of a validator. `field` names a field below the one that the validator checks."""
    context = {"message": message, "field": field, "code": code}
    return PydanticCustomError("refused", "{message}", context)


def refuse_wide_integers(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse integers of more than 64 bits in free data: messages between roles can't hold them."""
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise refusal("An integer has more than 64 bits.")
    return value


FreeObject = Annotated[dict[str, Any], AfterValidator(refuse_wide_integers)]
"""A JSON object with any content."""


class Strict(BaseModel):
    """A JSON object whose types are taken literally: no number from a string, no int from true.

    null means "not given", as OpenAI's clients send it. Undeclared names are refused. Names in
    `unsupported` are fields of OpenAI's or vLLM's API that Manta doesn't have: they pass only with
    a value that switches them off, else they are refused by name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {}
        for name, value in data.items():
            if value is None:
                continue
            if name not in cls.unsupported:
                given[name] = value
            elif not any(
                type(value) is type(off) and value == off for off in cls.unsupported[name]
            ):
                value_too = " with this value" if cls.unsupported[name] else ""
                raise refusal(
                    f"{name} is not supported yet{value_too}.", name, "unsupported_parameter"
                )
        return given
