"""Errors as Anthropic's API words them: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec

from deploy.http.errors import CONTEXT_LENGTH, ErrorReply
from engine.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(failure: RequestError) -> ErrorReply:
    """The error; its `type` follows from the status. The message names the field at fault.

    A prompt that is too long is told in Anthropic's words, by which agents know that they have to
    compact their conversation.
    """
    status, message, param = failure.status, failure.message, failure.param
    details = failure.details
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if failure.code == CONTEXT_LENGTH and details is not None:
        message = "prompt is too long: {num_tokens} tokens > {max_model_len} maximum".format(
            **details
        )
        details = None
    elif param is not None and param not in message:
        message = f"{param}: {message}"
    error = {"type": kind, "message": message} | ({"details": details} if details else {})
    body = msgspec.json.encode({"type": "error", "error": error})
    return ErrorReply(status, body, b"event: error\ndata: " + body + b"\n\n", failure.retry_after_s)
