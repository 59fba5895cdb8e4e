"""What becomes of a request whose client leaves: it is ended, or goes on for a while."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.http.generation.endpoint import CLIENT_GONE
from deploy.options import ServerOptions
from deploy.start.config import AppConfig
from engine.errors import ConfigError
from tests.support import kept_server
from tests.support.kept_server import Server, options

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 20,
    "request_id": "r",
    "seed": 3,
}
STREAM = {**BODY, "stream": True}
WAYS = ["says so", "is cancelled", "can't be written to", "reads nothing more"]


async def leave(
    app: Any, body: dict[str, Any], way: str = "says so", path: str = CHAT, **headers: str
) -> bytes:
    """Send a request, and leave it behind some events. Returns what came."""
    sent: list[bytes] = []
    left = asyncio.Event()
    asked: list[bool] = []

    async def send(message: Any) -> None:
        if left.is_set() and way == "can't be written to":
            raise OSError("the connection is closed")
        sent.append(message.get("body", b""))
        if len(sent) == 2:  # the first events came
            left.set()
            if way == "reads nothing more":
                await asyncio.Event().wait()

    async def receive() -> Any:
        if not asked:
            asked.append(True)
            content = json.dumps(body).encode()
            return {"type": "http.request", "body": content, "more_body": False}
        await (left.wait() if body.get("stream") else asyncio.sleep(0.05))
        left.set()
        if way == "is cancelled":
            await asyncio.Event().wait()
        if way != "says so":
            await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    given = {"content-type": "application/json", "host": "test", **headers}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": raw, "root_path": ""}
    task = asyncio.create_task(app(scope, receive, send))
    if way == "is cancelled":
        await left.wait()
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return b"".join(sent)


def run(server: ServerOptions, scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def long_answers(running: Server) -> None:
        running.client.script = None
        await scenario(running)

    kept_server.run(server, long_answers)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def in_flight(server: Server) -> float:
    metrics = server.metrics.unnamed
    found: float = metrics.in_flight.labels("chat_completions")._value.get()
    return found


def num_left(server: Server) -> float:
    metrics = server.metrics.unnamed
    status = str(CLIENT_GONE)
    found: float = metrics.requests.labels("chat_completions", status)._value.get()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on(way: str, tmp_path: Path) -> None:
    """To its end, which is kept; the metrics count it as any other that was left."""

    async def scenario(server: Server) -> None:
        server.client.step_s = 0.01
        had = await leave(server.app, STREAM, way)
        assert server.client.open == 1 and in_flight(server) == 1.0 and num_left(server) == 0.0
        status = (await server.http.get("/debug/status")).json()["request_store"]
        assert status == {
            **{"kind": "sqlite", "is_away": False, "open_here": 1, "left_here": 1},
            **{"made": 0, "waiting": 0},
        }
        await until(lambda: in_flight(server) == 0.0)
        assert server.client.finished == ["chatcmpl-r"] and server.client.aborted == []
        assert num_left(server) == 1.0
        whole = await server.http.get(f"{CHAT}/chatcmpl-r", params={"stream": "true"})
        events = [event.split("\n", 1)[1] for event in whole.text.split("\n\n")[:-1]]
        assert "".join(f"{event}\n\n" for event in events).startswith(had.decode())

    run(options(tmp_path, on_disconnect="continue"), scenario)


@pytest.mark.parametrize("way", WAYS)
def test_not_for_longer_than_it_may(way: str, tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.client.hang_at = 10
        await leave(server.app, STREAM, way)
        await until(lambda: in_flight(server) == 0.0)
        assert server.client.aborted == ["chatcmpl-r"] and server.client.open == 0
        assert num_left(server) == 1.0
        assert (await server.http.delete(f"{CHAT}/chatcmpl-r")).status_code == 200

    run(options(tmp_path, on_disconnect="continue", on_disconnect_grace_s=0.2), scenario)


def test_a_slow_reader_that_leaves(tmp_path: Path) -> None:
    """What waited for it is let go, and what is stored is whole."""

    async def scenario(server: Server) -> None:
        server.client.step_s = 0.005
        await leave(server.app, {**STREAM, "store": True}, "reads nothing more")
        await until(lambda: in_flight(server) == 0.0)
        kept = (await server.http.get(f"{CHAT}/chatcmpl-r")).json()
        server.client.step_s = 0.0
        whole = (await server.http.post(CHAT, json=BODY)).json()
        assert kept["choices"] == whole["choices"]

    run(options(tmp_path, on_disconnect="continue"), scenario)


def test_replies_in_one_piece(tmp_path: Path) -> None:
    """Those that are stored go on, too."""

    async def scenario(server: Server) -> None:
        server.client.step_s = 0.01
        await leave(server.app, {**BODY, "store": True})
        await until(lambda: in_flight(server) == 0.0)
        (found,) = (await server.http.get(CHAT)).json()["data"]
        assert found["id"] == "chatcmpl-r" and found["usage"]["completion_tokens"] == 20
        await leave(server.app, BODY)  # nobody could find it
        assert server.client.aborted == ["chatcmpl-r"]

    run(options(tmp_path, on_disconnect="continue"), scenario)


def test_who_says_what(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        server.client.step_s = 0.01
        await leave(server.app, STREAM)  # the server's option
        assert server.client.open == 0
        await leave(server.app, STREAM, **{"x-on-disconnect": "continue"})
        assert server.client.open == 1
        await leave(server.app, STREAM, **{"x-on-disconnect": "continue"})
        assert server.client.open == 1, "one answer of a name goes on"
        await until(lambda: in_flight(server) == 0.0)
        for body, word in ((STREAM, "stay"), ({**STREAM, "store": False}, "continue")):
            status, error = await server.refusal(
                "POST", CHAT, json=body, headers={"x-on-disconnect": word}
            )
            assert (status, error["param"]) == (400, "X-On-Disconnect")

    run(options(tmp_path), scenario)


def test_what_isnt_kept_ends(tmp_path: Path) -> None:
    """Also if the store doesn't take it."""
    server = options(tmp_path, on_disconnect="continue")

    async def unkept(running: Server) -> None:
        running.client.step_s = 0.01
        await leave(running.app, {**STREAM, "store": False})
        assert running.client.open == 0 == in_flight(running)

    run(server, unkept)
    path = Path(server.request_store_path or "")
    path.mkdir(parents=True)
    run(server, unkept)

    async def without(running: Server) -> None:
        await leave(running.app, STREAM)
        assert running.client.open == 0 == in_flight(running)
        status = (await running.http.get("/debug/status")).json()["request_store"]
        assert status["is_away"] and status["made"] is None

    run(server, without)


def test_the_end_of_the_process(tmp_path: Path) -> None:
    """Is the end of what goes on; the record says that it was left."""

    async def scenario(server: Server) -> None:
        server.client.step_s = 0.01
        await leave(server.app, STREAM)
        assert server.client.open == 1
        await server.app.state.runner.stop()
        assert server.client.open == 0 == in_flight(server)

    run(options(tmp_path, on_disconnect="continue"), scenario)


def test_what_is_refused_at_the_start() -> None:
    args = {"model": "models/manta-small", "on_disconnect": "continue", "request_store": "none"}
    with pytest.raises(ConfigError, match="request_store: none"):
        AppConfig.from_args(args)
