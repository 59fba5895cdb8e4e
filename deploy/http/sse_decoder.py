"""The reader of server-sent events, for every client of an OpenAI stream in this repository."""

from __future__ import annotations

from typing import Final

DONE: Final = b"[DONE]"
"""Data of an OpenAI stream's last event."""


class SSEDecoder:
    """Splits a byte stream into the data of server-sent events; chunks may be cut anywhere.

    Follows the WHATWG event stream format as far as OpenAI streams use it: lines end in LF or
    CRLF, several `data:` lines are joined by LF, comments and other fields are ignored.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes, in order."""
        lines = (self._pending + chunk).split(b"\n")
        self._pending = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
