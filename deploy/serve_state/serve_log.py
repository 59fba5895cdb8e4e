"""What a replica's process writes to its log: our own lines, and the useful ones of Ray Serve."""

from __future__ import annotations

import logging
import re

from engine.errors import EngineDeadError, EngineDrainingError

OURS = ("engine", "deploy")
FORMAT = "%(levelname)s %(name)s: %(message)s"
_PROBE = re.compile(r"(GET|HEAD) (/\S*)?/(health|metrics) ")


def set_up(log_level: str) -> None:
    """Our loggers print from `log_level` on, with their names. Serve's loggers leave out access
    lines of probes, which come about every second. They also leave out tracebacks of requests that
    were given back or lost with their engine: these requests go on elsewhere, and one line of ours
    says how many."""
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(log_level)
        logger.propagate = False
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(FORMAT))
            logger.addHandler(handler)
    serve_log = logging.getLogger("ray.serve")
    if is_news not in serve_log.filters:
        serve_log.addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of Serve's is worth a line."""
    if getattr(record, "serve_access_log", False):
        return not _PROBE.match(record.getMessage())
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, EngineDrainingError | EngineDeadError)
