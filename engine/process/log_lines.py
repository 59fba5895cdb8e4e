"""How our processes write lines to their logs: as text, or as JSON objects."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
"""`json`: each line is one object with `time`, `level`, `logger`, `message`, `pid`, and
`exception` where there is one."""
TEXT = "%(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a record, in one line of ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Times are in UTC, as ISO 8601 has them."""
        fields: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process or 0,
        }
        parts = []
        if record.exc_info and record.exc_info[0] is not None:
            parts.append(self.formatException(record.exc_info))
        elif record.exc_text:
            parts.append(record.exc_text)
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        if parts:
            fields["exception"] = "\n".join(parts)
        return json.dumps(fields)


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    """The formatter of a format."""
    return JsonFormatter() if log_format == "json" else logging.Formatter(TEXT)


def log_to_stderr(names: Iterable[str], level: str | int, log_format: LogFormat) -> None:
    """Let the loggers of these names, and those below them, print from `level` on. A second
    call changes level and format."""
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
        for handler in logger.handlers:
            handler.setFormatter(formatter_of(log_format))
