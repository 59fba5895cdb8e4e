"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import traceback
from typing import NamedTuple

import msgspec

from engine.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
RETRY_STATUSES = (429, 503)
"""Statuses whose answers ask the client to try again (`Retry-After`)."""


class ErrorReply(NamedTuple):
    """HTTP status and JSON body of an error."""

    status: int
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the status needs."""
        return {"retry-after": "1"} if self.status in RETRY_STATUSES else {}

    @property
    def event(self) -> bytes:
        """The same error as a server-sent event, for streams that have begun."""
        return b"data: " + self.body + b"\n\n"


def error_reply(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorReply:
    """Compose an error; its `type` follows from `status`."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return ErrorReply(status, msgspec.json.encode({"error": error}))


def reply_to(exception: BaseException, request_id: str) -> ErrorReply:
    """What the client is told about `exception`.

    Of an unexpected exception the client is told only that it happened. Neither the reply nor the
    log holds its text, which may quote the prompt. The log has its type and stack.
    """
    if isinstance(exception, RequestError):
        return error_reply(exception.status, exception.message, exception.param, exception.code)
    if isinstance(exception, EngineDeadError):
        logger.error("request %s: the engine is gone: %s", request_id, exception)
        return error_reply(
            503, "The engine is not available; try again shortly.", code="engine_unavailable"
        )
    stack = "".join(traceback.format_tb(exception.__traceback__))
    logger.error("request %s failed with %s:\n%s", request_id, type(exception).__name__, stack)
    return error_reply(
        500,
        f"The server had an error while processing request {request_id}.",
        code="internal_error",
    )
