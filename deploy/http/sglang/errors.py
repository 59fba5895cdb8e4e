"""Errors as SGLang's API words them: `{"error": {"message"}}`."""

from __future__ import annotations

import msgspec

from deploy.http.errors import ErrorReply
from engine.errors import RequestError


def sglang_error(failure: RequestError) -> ErrorReply:
    """The error. The message names the field at fault."""
    message, param = failure.message, failure.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    body = msgspec.json.encode({"error": {"message": message}})
    return ErrorReply(failure.status, body, b"data: " + body + b"\n\n", failure.retry_after_s)
