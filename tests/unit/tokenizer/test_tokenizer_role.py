"""`TokenizerRole`: long texts are encoded beside the streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import tokenizer_messages as tm
from engine.protocol.messages import Shutdown
from engine.protocol.transport import Inbox, Outbox
from engine.tokenizer.encoding_thread import LONG, is_long
from engine.tokenizer.tokenizer_role import TokenizerRole
from tests.support.tiny_tokenizers import write_byte_level

HOST = "127.0.0.1"


class Peer:
    """A role that runs in a thread, and its client."""

    def __init__(self, model: Path) -> None:
        self.role = TokenizerRole(str(model), HOST)
        self.inbox = Inbox(HOST)
        self.outbox = Outbox(self.role.address)
        self.thread = threading.Thread(target=self.role.run)
        self.thread.start()

    def encode(self, call: int, text: str) -> None:
        self.outbox.send(tm.EncodeRequest(call, self.inbox.address, [text]))

    def reply(self) -> Any:
        reply = self.inbox.recv(10.0)
        assert reply is not None
        return reply

    def close(self) -> None:
        self.outbox.send(Shutdown())
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.outbox.close()
        self.inbox.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    running = Peer(write_byte_level(tmp_path))
    yield running
    running.close()


def test_a_short_text_does_not_wait_for_a_long_one(peer: Peer) -> None:
    may_go_on = threading.Event()
    encode = peer.role.tokenizer.encode_batch

    def slow(texts: list[str], special: bool = True) -> list[list[int]]:
        if len(texts[0]) > LONG:
            assert may_go_on.wait(10)
        return encode(texts, special)

    peer.role.tokenizer.encode_batch = slow  # type: ignore[method-assign,assignment]
    peer.encode(1, "a" * (LONG + 1))
    peer.encode(2, "b")
    assert peer.reply().call == 2
    may_go_on.set()
    reply = peer.reply()
    assert reply.call == 1 and reply.ids == encode(["a" * (LONG + 1)])


def test_a_bad_long_text_is_answered(peer: Peer) -> None:
    message = {"role": "user", "content": "a" * (LONG + 1)}
    refused = tm.Conversation([message], template_kwargs={"bos_token": "x"})
    peer.outbox.send(tm.ChatRequest(3, peer.inbox.address, refused))
    reply = peer.reply()
    assert reply.call == 3 and "bos_token" in reply.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_thread_ends_the_role(tmp_path: Path) -> None:
    peer = Peer(write_byte_level(tmp_path))

    def broken(texts: list[str], special: bool = True) -> list[list[int]]:
        raise AssertionError("a bug")

    peer.role.tokenizer.encode_batch = broken  # type: ignore[method-assign,assignment]
    peer.encode(1, "a" * (LONG + 1))
    peer.thread.join(10)
    assert not peer.thread.is_alive()
    peer.outbox.close()
    peer.inbox.close()


def test_what_is_long() -> None:
    def chat(*contents: Any, **more: Any) -> tm.ChatRequest:
        messages = [{"role": "user", "content": c} for c in contents]
        return tm.ChatRequest(1, "", tm.Conversation(messages, **more))

    half = "a" * (LONG // 2 + 1)
    assert not is_long(tm.EncodeRequest(1, "", [half]))
    assert is_long(tm.EncodeRequest(1, "", [half, half]))
    assert not is_long(chat(half)) and is_long(chat(half, half))
    assert is_long(chat([{"type": "text", "text": half}] * 2))
    assert is_long(chat(*[""] * LONG))
    assert is_long(chat("", tools=[{"a": half, "b": half}]))
    assert is_long(chat("", template_kwargs={"a": [0] * LONG}))
