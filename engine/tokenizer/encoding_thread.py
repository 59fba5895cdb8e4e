"""`EncodingThread`: encodes long texts beside the detokenizer, so that no stream waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from engine.protocol import tokenizer_messages as tm
from engine.protocol.messages import Shutdown
from engine.protocol.outboxes import Outboxes

LONG = 8192
"""Characters. A text of this length takes some 2 ms, which a stream may wait."""

Request = tm.EncodeRequest | tm.ChatRequest


def is_long(request: Request) -> bool:
    """Whether the texts have more than `LONG` characters."""
    waiting: list[Any] = [request.texts if isinstance(request, tm.EncodeRequest) else None]
    if isinstance(request, tm.ChatRequest):
        chat = request.chat
        waiting += [chat.messages, chat.tools, chat.template_kwargs]
    size = 0
    while waiting and size <= LONG:
        value = waiting.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            waiting += value.values()
            size += len(value)
        elif isinstance(value, list):
            waiting += value
            size += len(value)
    return size > LONG


class EncodingThread:
    """Answers requests one after the other. Its connections are its own."""

    def __init__(self, answer: Callable[[Request], tm.EncodeReply], role_address: str) -> None:
        """If `answer` raises, the role at `role_address` is told to stop."""
        self._answer = answer
        self._role_address = role_address
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="encoding", daemon=True)
        self._thread.start()

    def put(self, request: Request) -> None:
        """Answer `request` soon."""
        self._requests.put(request)

    def close(self) -> None:
        """Stop when the request that is being answered is done; the others stay unanswered."""
        while not self._requests.empty():
            self._requests.get()
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        outboxes = Outboxes()
        try:
            while (request := self._requests.get()) is not None:
                reply = self._answer(request)
                if not outboxes.send(request.reply_to, reply):
                    outboxes.drop(request.reply_to)
        except BaseException:
            outboxes.send(self._role_address, Shutdown())
            raise
        finally:
            outboxes.close()
