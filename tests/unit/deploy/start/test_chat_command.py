"""`manta chat` against the real HTTP application over a fake engine."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from deploy.start import cli
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
