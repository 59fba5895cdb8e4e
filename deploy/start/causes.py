"""Why a start failed, in one sentence, from what Ray and HAProxy say about it."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.start.log_file import ANSI

_RAISED = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception))(?:\(\w+\))?: (.+)$")
_OURS = re.compile(r"(?:engine\.errors\.|\b)(?:ConfigError|EngineDeadError|RequestError): ")
"""The text of these exceptions is a sentence for users. Other exceptions are shown with their
name."""
_CONFIG_ERROR = re.compile(r"engine\.errors\.ConfigError: (.+)$")
_BOUND = re.compile(r"cannot bind .*?\((.+?)\).*?\[([^\]]+)\]")


def cause_of(message: str) -> str:
    """The cause in a message of Serve's or in the end of a log; both hold tracebacks. The cause is
    the last exception of ours if there is one, else the last exception; "" if there is none."""
    found = [m for line in _lines(message) if (m := _RAISED.match(line))]
    ours = [m[0] for m in found if _OURS.search(m[0])]
    if ours:
        return _innermost(ours[-1])
    return f"{found[-1][1]}: {found[-1][2]}" if found else ""


def config_error_in(line: str) -> str:
    """The error of the configuration that a line of the log reports, else "". With such an error
    trying again, as Serve does, won't help."""
    match = _CONFIG_ERROR.search(ANSI.sub("", line).strip())
    return _innermost(match[0]) if match else ""


def _innermost(text: str) -> str:
    """Only the text of the last exception of ours, without exceptions that followed from it."""
    return _OURS.split(text)[-1].strip()


def port_taken(folder: Path) -> str:
    """HAProxy's complaint that it can't listen, if it has one in its logs in `folder`; else ""."""
    for log in folder.glob("*/*.stderr.log"):
        try:
            match = _BOUND.search(log.read_text(errors="replace"))
        except FileNotFoundError:  # Ray keeps only the last ones
            continue
        if match:
            return f"HAProxy can't listen on {match[2]}: {match[1]}. Choose another --port."
    return ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in ANSI.sub("", text).splitlines() if line.strip()]
