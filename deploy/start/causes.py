"""Why a start failed, in one sentence, from what Ray and HAProxy say about it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deploy.start.log_file import ANSI

_RAISED = re.compile(r"^(?:[\w]+\.)*(\w*(?:Error|Exception))(?:\(\w+\))?: (.+)$")
_TOLD = ("ConfigError", "EngineDeadError", "MantaError")
"""Their text is a sentence for users; others need their name beside it."""
_BOUND = re.compile(r"cannot bind .*?\((.+?)\).*?\[([^\]]+)\]")


def cause_of(message: str) -> str:
    """The cause in a message of Serve's, which holds tracebacks: the most telling exception, which
    is ours where there is one, else the last."""
    found = [m for line in _lines(message) if (m := _RAISED.match(line))]
    ours = [m[2] for m in found if m[1] in _TOLD]
    if ours:
        return ours[-1]
    if found:
        return f"{found[-1][1]}: {found[-1][2]}"
    lines = _lines(message)
    return lines[-1] if lines else "no reason was given"


def cause_in_log(lines: Iterable[str]) -> str:
    """The last exception among a log's last lines; "" if there is none."""
    found = [m for line in lines for part in _lines(line) if (m := _RAISED.match(part))]
    if not found:
        return ""
    name, text = found[-1][1], found[-1][2]
    return text if name in _TOLD else f"{name}: {text}"


def port_taken(folder: Path) -> str:
    """HAProxy's complaint that it can't listen, if it has one in its logs in `folder`; else ""."""
    for log in folder.glob("*/*.stderr.log"):
        match = _BOUND.search(log.read_text(errors="replace"))
        if match:
            return f"HAProxy can't listen on {match[2]}: {match[1]}. Choose another --port."
    return ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in ANSI.sub("", text).splitlines() if line.strip()]
