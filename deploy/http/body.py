"""Bodies of requests and replies: from bytes to checked fields, and from values to bytes."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.responses import Response

from engine.errors import RequestError

M = TypeVar("M", bound=BaseModel)
LARGE_BODY = 64 * 1024
"""Bytes. Smaller ones are parsed in a millisecond or two."""
MAX_CONTAINERS = 100_000
"""JSON objects and arrays of a body."""
MAX_MESSAGES = 2048
"""Of a conversation."""
CONTENT_UNLESS_ASSISTANT: JsonDict = {
    "anyOf": [{"properties": {"role": {"const": "assistant"}}}, {"required": ["content"]}]
}
"""JSON schema: an earlier reply may have no content, other messages must have some."""
# Clients that split text at Unicode's line ends (httpx's iter_lines) must not see them raw.
_LINE_ENDS = re.compile(b"\xe2\x80[\xa8\xa9]|\xc2\x85")
_ESCAPES = {
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
    b"\xc2\x85": b"\\u0085",
}

_encode = msgspec.json.Encoder().encode


def encode_json(value: Any) -> bytes:
    """JSON in one line, also for readers that split lines at Unicode's line ends."""
    data = _encode(value)
    if data.isascii():
        return data
    return _LINE_ENDS.sub(lambda match: _ESCAPES[match[0]], data)


def json_response(value: Any, status: int = 200) -> Response:
    """A reply that is JSON."""
    return Response(encode_json(value), status, media_type="application/json")


def refusal(
    message: str, field: str = "", code: str = "", details: dict[str, Any] | None = None
) -> PydanticCustomError:
    """Error of a validator. `field` names a field below the one that the validator checks."""
    context = {"message": message, "field": field, "code": code, "details": details}
    return PydanticCustomError("refused", "{message}", context)


def check_content(message: BaseModel, role: str) -> None:
    """Refuse a message of `role` whose content wasn't given (`CONTENT_UNLESS_ASSISTANT`)."""
    if "content" not in message.model_fields_set and role != "assistant":
        raise refusal(f"A {role} message must have content.", "content")


def type_of(value: Any) -> Any:
    """What a JSON object, or a model that was made of one, has as its `type`: in bodies that aren't
    checked yet any value. None if there is none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


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


Effort = Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
"""How much a model is to reason, for templates that read it: `none`, `low`, `high`, ..."""
FreeObject = Annotated[dict[str, Any], AfterValidator(refuse_wide_integers)]
"""A JSON object with any content."""


class Strict(BaseModel):
    """A JSON object whose types are taken literally: no number from a string, no int from true.

    null means "not given", as OpenAI's clients send it. Undeclared names are refused. Names in
    `ignored` are fields that can't change the output: they label, store, bill or route a request.
    They pass, whatever their value. Names in `unsupported` are fields that could change it and that
    Manta doesn't have: they pass only with a value that switches them off, else they are refused by
    name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The OpenAPI document names the ignored fields, too."""
        schema = handler(core_schema)
        if cls.ignored:
            properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
            for name in sorted(cls.ignored):
                properties[name] = {"description": "Accepted, without effect."}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {}
        for name, value in data.items():
            if value is None or name in cls.ignored:
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


_SENTENCES = {
    "missing": "You must provide {param}.",
    "extra_forbidden": "Unrecognized request argument supplied: {param}",
    "union_tag_not_found": "You must provide {param}.type.",
}


def parse_request(body: bytes, kind: type[M]) -> M:
    """Decode and check a request. Raises `RequestError` naming the field, or the place in JSON."""
    data = decode_json(body)
    if not isinstance(data, dict):
        raise RequestError("The request body must be a JSON object.")
    if len(body) > LARGE_BODY:
        _check_number_of_containers(data)
    try:
        return kind.model_validate(data)
    except ValidationError as exception:
        raise _first_error(exception, data) from None


async def parse_body(body: bytes, kind: type[M]) -> M:
    """As `parse_request`; a large body doesn't hold up the event loop."""
    if len(body) <= LARGE_BODY:
        return parse_request(body, kind)
    return await asyncio.to_thread(parse_request, body, kind)


def decode_json(body: bytes) -> Any:
    """The value of a JSON text. Raises `RequestError` saying where it is broken."""
    if not body.strip():
        raise RequestError("The request body is empty; it must be a JSON object.")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exception:
        raise _broken_json(body, str(exception)) from None


def _check_number_of_containers(data: dict[str, Any]) -> None:
    """Raise `RequestError` if there are so many objects and lists that to go through them would
    take seconds."""
    waiting: list[Any] = [data]
    count = 0
    while waiting:
        item = waiting.pop()
        count += 1
        if count > MAX_CONTAINERS:
            raise RequestError(
                f"The request body has more than {MAX_CONTAINERS} JSON objects and arrays."
            )
        items = item.values() if isinstance(item, dict) else item
        waiting += [each for each in items if isinstance(each, dict | list)]


def _broken_json(body: bytes, reason: str) -> RequestError:
    """Explain what msgspec refused. The standard library's parser is slower but says where.

    That parser also reads NaN, Infinity and 1e999, which aren't JSON, so that the field can be
    named.
    """
    try:
        value = json.loads(body.decode())
    except json.JSONDecodeError as exception:
        return RequestError(
            f"The request body is not valid JSON: {exception.msg} at line {exception.lineno}, "
            f"column {exception.colno}."
        )
    except UnicodeDecodeError as exception:
        return RequestError(f"The request body is not UTF-8 at byte {exception.start}.")
    except RecursionError:
        return RequestError("The request body is nested too deeply.")
    except ValueError:
        return RequestError("The request body has an integer of too many digits.")
    path = _find_non_finite(value, ())
    if path is not None:
        return RequestError(f"{_param(path)} must be a finite number.", _param(path))
    return RequestError(f"The request body is not valid JSON: {reason}.")


def _find_non_finite(value: Any, path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return None
    for key, item in items:
        found = _find_non_finite(item, (*path, key))
        if found is not None:
            return found
    return None


def _first_error(exception: ValidationError, data: dict[str, Any]) -> RequestError:
    """What to say of all errors: the first; of those that the kinds of a union have, the one that
    got farthest."""
    first, *others = [
        (_place(error["loc"], data, error["type"] == "missing"), error)
        for error in exception.errors(include_url=False, include_input=False)
    ]
    rivals = [other for other in others if other[0][: len(first[0])] == first[0]]
    path, error = max([first, *rivals], key=lambda found: len(found[0]))
    kind, message = error["type"], error["msg"]
    if kind == "refused":
        context = error["ctx"]
        if context["field"]:
            path = (*path, context["field"])
        return RequestError(
            context["message"],
            _param(path),
            code=context["code"] or None,
            details=context["details"],
        )
    param = _param(path)
    if kind.endswith(("_type", "literal_error")):
        wanted = [_wanted(each) for place, each in [first, *rivals] if place == path]
        message = f"input should be {' or '.join(dict.fromkeys(wanted))}"
    message = message[:1].lower() + message[1:]
    sentence = _SENTENCES.get(kind, "Invalid value for {param}: {message}.")
    return RequestError(
        sentence.format(param=param, message=message),
        param,
        code="unknown_parameter" if kind == "extra_forbidden" else None,
    )


def _wanted(error: Any) -> str:
    """What the error of a wrong type asks for."""
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "an object"
    return str(error["msg"]).removeprefix("Input should be ")


def _place(path: tuple[str | int, ...], data: Any, is_missing: bool) -> tuple[str | int, ...]:
    """The part of an error's path that leads through the data, and the field at its end if that is
    missing. Between them pydantic names the kinds of unions."""
    place: list[str | int] = []
    for at, part in enumerate(path):
        is_there = isinstance(data, list) if isinstance(part, int) else isinstance(data, dict)
        if is_there and (isinstance(part, int) or part in data):
            data = data[part]
            place.append(part)
        elif is_missing and at == len(path) - 1:
            place.append(part)
    return tuple(place)


def _param(path: tuple[str | int, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]
