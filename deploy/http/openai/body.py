"""From the bytes of a request body to a checked request."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from engine.errors import RequestError

M = TypeVar("M", bound=BaseModel)

_SENTENCES = {
    "missing": "You must provide {param}.",
    "extra_forbidden": "Unrecognized request argument supplied: {param}",
}


def parse_request(body: bytes, kind: type[M]) -> M:
    """Decode and check a request. Raises `RequestError` naming the field, or the place in JSON."""
    data = decode_json(body)
    if not isinstance(data, dict):
        raise RequestError("The request body must be a JSON object.")
    try:
        return kind.model_validate(data)
    except ValidationError as exception:
        raise _first_error(exception) from None


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


def _broken_json(body: bytes, reason: str) -> RequestError:
    """Explain what msgspec refused: the standard library's parser is slower but says where.

    It also reads NaN, Infinity and 1e999, which aren't JSON, so that the field can be named.
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


def _first_error(exception: ValidationError) -> RequestError:
    error = exception.errors(include_url=False, include_input=False)[0]
    path, kind = error["loc"], error["type"]
    if kind == "refused":
        context = error["ctx"]
        if context["field"]:
            path = (*path, context["field"])
        return RequestError(context["message"], _param(path), code=context["code"] or None)
    param = _param(path)
    message = error["msg"][:1].lower() + error["msg"][1:]
    sentence = _SENTENCES.get(kind, "Invalid value for {param}: {message}.")
    return RequestError(
        sentence.format(param=param, message=message),
        param,
        code="unknown_parameter" if kind == "extra_forbidden" else None,
    )


def _param(path: tuple[str | int, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]
