"""`HeldInterrupts`: Ctrl-C only where nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldInterrupts:
    """A context in which the first Ctrl-C waits for the next `let_in`, or for the context's end.

    Then the handler that was there is called; Python's own raises `KeyboardInterrupt`. Every later
    Ctrl-C is handled at once. The context changes the process's handler of SIGINT and puts the old
    one back. In threads other than the main one, which handle no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._is_first = True
        self._is_held = False

    def __enter__(self) -> HeldInterrupts:
        handler = signal.getsignal(signal.SIGINT)
        # Not callable: ignored, left to the system, or set by C code.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if kind is None:
            self.let_in()

    def let_in(self) -> None:
        """Handle the Ctrl-C that is held, if one is."""
        if self._is_held and self._handler is not None:
            self._is_held = False
            self._handler(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._is_held = True
        if not self._is_first:
            self.let_in()
        self._is_first = False
