"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec

from deploy.http.errors import ErrorReply
from engine.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def openai_error(failure: RequestError) -> ErrorReply:
    """The error; its `type` follows from the status."""
    status = failure.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {
        "message": failure.message,
        "type": kind,
        "param": failure.param,
        "code": failure.code,
    }
    body = msgspec.json.encode({"error": error})
    return ErrorReply(status, body, b"data: " + body + b"\n\n", failure.retry_after_s)
