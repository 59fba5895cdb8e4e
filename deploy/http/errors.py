"""What went wrong with a request, before an API words it in its own shape."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

RETRY_STATUSES = (429, 503)
"""Statuses whose answers ask the client to try again (`Retry-After`)."""
CONTEXT_LENGTH = "context_length_exceeded"
"""The code of a prompt that is too long; agents compact their conversation when they see it."""


class Failure(NamedTuple):
    """HTTP status and words. `param`: the field at fault; `code`: a word for programs;
    `retry_after_s`: when to try again, if the status asks for it; `details`: more for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int = 1
    details: Mapping[str, Any] | None = None


class ErrorReply(NamedTuple):
    """A failure as an API says it: status, JSON body, and the event of streams that have begun."""

    status: int
    body: bytes
    event: bytes
    retry_after_s: int = 1

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the status needs."""
        return {"retry-after": str(self.retry_after_s)} if self.status in RETRY_STATUSES else {}


def failure_of(exception: BaseException, request_id: str) -> Failure:
    """What the client is told about `exception`.

    Of an unexpected exception the client is told only that it happened. Neither the reply nor the
    log holds its text, which may quote the prompt. The log has its type and stack.
    """
    if isinstance(exception, RequestError):
        return Failure(
            exception.status,
            exception.message,
            exception.param,
            exception.code,
            exception.retry_after_s,
            exception.details,
        )
    if isinstance(exception, EngineDeadError):
        logger.error("request %s: the engine is gone: %s", request_id, exception)
        message = "The engine is not available; try again shortly."
        return Failure(503, message, code="engine_unavailable")
    stack = "".join(traceback.format_tb(exception.__traceback__))
    logger.error("request %s failed with %s:\n%s", request_id, type(exception).__name__, stack)
    message = f"The server had an error while processing request {request_id}."
    return Failure(500, message, code="internal_error")
