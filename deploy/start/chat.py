"""`manta chat`: a conversation with a served model in the terminal, streamed as it is written."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from deploy.http.access.listening import is_loopback
from deploy.http.sse_decoder import DONE, SSEDecoder

TIMEOUT = httpx.Timeout(10.0, read=600.0)
PATH = "/v1/chat/completions"
READ_ON_S, PAUSE_S = 90.0, 0.5
"""How long a lost answer is asked for again, and how often."""
HELP = "Ctrl-C stops an answer, /reset begins anew, /help shows this, /quit or Ctrl-D ends."


class Chat:
    """Reads lines, prints answers; the conversation grows by both."""

    def __init__(
        self, url: str, model: str | None, max_tokens: int | None, temperature: float | None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._messages: list[dict[str, str]] = []

    def run(self) -> int:
        """Chat until the input ends. Returns the exit status: 1 if the server can't be reached."""
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A proxy of the environment can't reach this machine's own loopback.
        use_proxy = not is_loopback(httpx.URL(self._url).host)
        with httpx.Client(
            base_url=self._url, headers=headers, timeout=TIMEOUT, trust_env=use_proxy
        ) as http:
            try:
                model = self._model or http.get("/v1/models").raise_for_status().json()["data"][0]
                self._model = model if isinstance(model, str) else str(model["id"])
            except (httpx.HTTPError, ValueError, LookupError) as error:
                print(f"error: no server answers at {self._url}: {error}", file=sys.stderr)
                return 1
            if sys.stdin.isatty():
                import readline  # noqa: F401  # gives `input` its editing keys

                print(f"{self._model}: {HELP}")
            return self._converse(http)

    def _converse(self, http: httpx.Client) -> int:
        status = 0
        while (line := _next_line()) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                self._messages.clear()
            elif line in ("/help", "/?"):
                print(HELP)
            elif line:
                status = self._exchange(http, line)
        return status

    def _exchange(self, http: httpx.Client, line: str) -> int:
        """Ask one question and print the answer. A failed question isn't kept in the conversation.
        Returns the exit status."""
        asked = [*self._messages, {"role": "user", "content": line}]
        answer = ""
        try:
            for piece in self._answer(http, asked):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except (httpx.HTTPError, ChatError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print()
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return 0

    def _answer(self, http: httpx.Client, messages: list[dict[str, str]]) -> Iterator[str]:
        options = {key: value for key, value in self._options.items() if value is not None}
        body = {"model": self._model, "messages": messages, "stream": True, **options}
        place = _Place()
        call = partial(http.stream, "POST", PATH, json=body)
        while True:
            try:
                yield from _texts(call, place)
                return
            except httpx.TransportError as error:
                now = time.monotonic()
                if place.lost_since is None:
                    place.lost_since, place.loss = now, error
                if not place.reply_id or now > place.lost_since + READ_ON_S:
                    raise
            time.sleep(PAUSE_S)
            query = {"stream": "true", "starting_after": str(place.num_events)}
            call = partial(http.stream, "GET", f"{PATH}/{place.reply_id}", params=query)


_Call = Callable[[], AbstractContextManager[httpx.Response]]


@dataclass
class _Place:
    """How much of a stream has come; since when it is lost, and why."""

    reply_id: str = ""
    num_events: int = 0
    lost_since: float | None = None
    loss: Exception | None = None


def _texts(call: _Call, place: _Place) -> Iterator[str]:
    """The texts of a stream's events. Raises `httpx.TransportError` if it is lost."""
    with call() as reply:
        if (reply.status_code >= 500 or reply.status_code == 429) and place.reply_id:
            raise httpx.ReadError(f"status {reply.status_code}")
        if reply.status_code == 404 and place.loss is not None:
            raise ChatError(f"the connection was lost ({place.loss})")  # it isn't kept
        if reply.status_code != 200:
            raise ChatError(_message_of(reply.read()) or f"status {reply.status_code}")
        decoder = SSEDecoder()
        for part in reply.iter_bytes():
            for data in decoder.feed(part):
                if data == DONE:
                    return
                chunk = json.loads(data)
                text = _text_of(chunk)
                place.reply_id, place.lost_since = chunk["id"], None
                place.num_events += 1
                yield text
    raise httpx.RemoteProtocolError("the connection was lost before the answer was complete")


class ChatError(Exception):
    """The server doesn't answer; the message is its reason."""


def _next_line() -> str | None:
    """The next line without surrounding blanks; None at the end of the input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _text_of(chunk: dict[str, Any]) -> str:
    """The text that an event adds to the answer. Raises `ChatError` if the event is an error."""
    if "error" in chunk:
        raise ChatError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _message_of(body: bytes) -> str:
    try:
        error: Any = json.loads(body)
        return str(error["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
