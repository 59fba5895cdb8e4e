"""Which of Ray Serve's own log lines in a replica's process are noise."""

from __future__ import annotations

import logging
import re

from engine.errors import EngineDeadError, EngineDrainingError

_PROBE = re.compile(r"(GET|HEAD) /(health|metrics) ")


def quieten() -> None:
    """Keep out of this process's Serve log: access lines of probes, which come every second or so,
    and tracebacks of requests that were given back or lost with their engine: they go on elsewhere,
    and one line of our own says how many."""
    serve_log = logging.getLogger("ray.serve")
    if is_news not in serve_log.filters:
        serve_log.addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of Serve's is worth a line."""
    if getattr(record, "serve_access_log", False):
        return not _PROBE.match(record.getMessage())
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, EngineDrainingError | EngineDeadError)
