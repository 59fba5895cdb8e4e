"""What went wrong with a request, before an API words it in its own shape."""

from __future__ import annotations

import logging
import traceback
from typing import NamedTuple

from engine.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

RETRY_STATUSES = (429, 503)
"""Statuses whose answers ask the client to try again (`Retry-After`)."""
CONTEXT_LENGTH = "context_length_exceeded"
"""The code of a prompt that is too long; agents compact their conversation when they see it."""


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


def failure_of(exception: BaseException, request_id: str) -> RequestError:
    """What the client is told about `exception`: itself, if it is a `RequestError`.

    Of an unexpected exception the client is told only that it happened. Neither the reply nor the
    log holds its text, which may quote the prompt. The log has its type and stack.
    """
    if isinstance(exception, RequestError):
        return exception
    if isinstance(exception, EngineDeadError):
        logger.error("request %s: the engine is gone: %s", request_id, exception)
        message = "The engine is not available; try again shortly."
        return RequestError(message, status=503, code="engine_unavailable")
    stack = "".join(traceback.format_tb(exception.__traceback__))
    logger.error("request %s failed with %s:\n%s", request_id, type(exception).__name__, stack)
    message = f"The server had an error while processing request {request_id}."
    return RequestError(message, status=500, code="internal_error")
