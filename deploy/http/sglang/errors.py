"""Errors as SGLang's API words them: `{"error": {"message"}}`."""

from __future__ import annotations

import msgspec

from deploy.http.errors import ErrorReply, Failure


def sglang_error(failure: Failure) -> ErrorReply:
    """The error. The message names the field at fault."""
    status, message, param, _, retry_after_s, _ = failure
    if param is not None and param not in message:
        message = f"{param}: {message}"
    body = msgspec.json.encode({"error": {"message": message}})
    return ErrorReply(status, body, b"data: " + body + b"\n\n", retry_after_s)
