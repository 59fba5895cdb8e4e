"""What a replica's process writes to its log: our own lines, and the useful ones of Ray Serve."""

from __future__ import annotations

import logging
import re

from engine.errors import EngineDeadError, EngineDrainingError
from engine.process.log_lines import LogFormat, formatter_of, log_to_stderr

OURS = ("engine", "deploy")
_PROBE = re.compile(r"(GET|HEAD) (/\S*)?/(health|metrics) ")


def set_up(log_level: str, log_format: LogFormat = "text") -> None:
    """Our loggers print from `log_level` on, with their names. Serve's loggers leave out access
    lines of probes, which come about every second. They also leave out tracebacks of requests that
    were given back or lost with their engine: these requests go on elsewhere, and one line of ours
    says how many."""
    log_to_stderr(OURS, log_level, log_format)
    serve_log = logging.getLogger("ray.serve")
    if is_news not in serve_log.filters:
        serve_log.addFilter(is_news)
    if log_format == "json":
        # Serve's own JSON encoding is for its files alone; what it prints would stay text.
        for handler in serve_log.handlers:
            if type(handler) is logging.StreamHandler:
                handler.setFormatter(formatter_of(log_format))


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of Serve's is worth a line."""
    if getattr(record, "serve_access_log", False):
        return not _PROBE.match(record.getMessage())
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, EngineDrainingError | EngineDeadError)
