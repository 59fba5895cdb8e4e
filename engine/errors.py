"""Errors that users see. Each says which field is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MantaError(Exception):
    """Base of every error that Manta raises on purpose."""


class ConfigError(MantaError):
    """The configuration or the checkpoint can't be served; the message says what to change."""


class RequestError(MantaError):
    """One request can't be served.

    `param` names the request field at fault (None if no single field is), `status` is the HTTP
    status, `code` a machine-readable word as in OpenAI's error bodies. `retry_after_s`: when to try
    again, for statuses that ask for it. `details`: more for programs, by name.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int = 1,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = details


class EngineDeadError(MantaError):
    """A role of the engine (scheduler, worker) died; requests on it can't go on."""


class EngineDrainingError(MantaError):
    """The engine gives a request back unharmed: the engine is being stopped, or nobody read the
    request's output."""


class KVPoolError(RuntimeError):
    """The KV bookkeeping was misused or is inconsistent: a double free, a foreign slot, a leak.

    Never raised for a pool that is only full: that is a normal state, for which calls return None.
    """
