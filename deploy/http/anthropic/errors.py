"""Errors as Anthropic's API words them: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec

from deploy.http.errors import ErrorReply, Failure

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(failure: Failure) -> ErrorReply:
    """The error; its `type` follows from the status. The message names the field at fault."""
    status, message, param, _, retry_after_s = failure
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if param is not None and param not in message:
        message = f"{param}: {message}"
    body = msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return ErrorReply(status, body, b"event: error\ndata: " + body + b"\n\n", retry_after_s)
