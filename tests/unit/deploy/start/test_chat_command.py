"""`manta chat` against the real HTTP application over a fake engine."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from deploy.start import chat, cli
from tests.support.fake_client import FakeEngineClient
from tests.support.http_application import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(FakeEngineClient())
    server.start()
    yield server
    server.stop()


def talk(server: Server | int, lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    port = server if isinstance(server, int) else server.port
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return cli.main(["chat", "--url", f"http://127.0.0.1:{port}/v1", *options])


def test_a_conversation_grows_and_begins_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "hello\n\nand then?\n/reset\nagain\n/quit\nnever\n"
    options = ("--max-tokens", "5", "--temperature", "0")
    assert talk(server, lines, monkeypatch, *options) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 3 and all(answers)
    sent = [call["messages"] for call in server.client.chat_calls]
    assert [[m["role"] for m in messages] for messages in sent] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
    assert sent[1][1]["content"] == answers[0]
    assert [request.params.max_tokens for request in server.client.started] == [5, 5, 5]


def test_an_error_is_told_and_the_conversation_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(server, "x\n", monkeypatch, "--temperature=-1") == 1
    told = capsys.readouterr()
    assert "temperature" in told.err and told.out == ""
    assert talk(server, "x\n", monkeypatch, "--model", "other") == 1
    assert "other" in capsys.readouterr().err


class CuttingProxy:
    """Hands bytes on to a server, and cuts replies after `limits` bytes, one after the other."""

    def __init__(self, port: int, limits: list[int]) -> None:
        self._to, self._limits = port, limits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._forth, args=(client, server), daemon=True).start()
            threading.Thread(target=self._back, args=(client, server), daemon=True).start()

    def _forth(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)

    def _back(self, client: socket.socket, server: socket.socket) -> None:
        count = 0
        with suppress(OSError):
            while data := server.recv(300):
                count += len(data)
                client.sendall(data)
                if b"/v1/models" not in data and self._limits and count > self._limits[0]:
                    self._limits.pop(0)
                    self.num_cuts += 1
                    break
            client.shutdown(socket.SHUT_RDWR)
            server.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_an_answer_that_was_cut_is_read_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.client.script = "All of this is to come, and nothing of it twice. " * 4
    server.client.step_s = 0.001
    monkeypatch.setattr(chat, "PAUSE_S", 0.01)
    proxy = CuttingProxy(server.port, [9000, 300, 5000])
    try:
        assert talk(proxy.port, "x\n", monkeypatch, "--max-tokens", "200") == 0
    finally:
        proxy.close()
    told = capsys.readouterr()
    assert told.out == server.client.script + "\n" and told.err == ""
    assert proxy.num_cuts == 3


def test_no_server_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(9, "x\n", monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no server answers at http://127.0.0.1:9") and "\n" in error[-1]


def test_help_is_no_question(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(server, "/help\n", monkeypatch) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("/reset", "/quit", "/help"))
    assert server.client.chat_calls == []
