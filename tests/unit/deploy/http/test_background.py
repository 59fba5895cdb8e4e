"""Responses in the background: who makes them, whatever process is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.http.openai.responses.replies import Response
from deploy.http.records import runner, sqlite_store
from engine.errors import EngineDeadError, RequestError
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.kept_server import OneProcess

PATH = "/v1/responses"
LEASE_S = 0.4


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "LEASE_S", LEASE_S)
    monkeypatch.setattr(runner, "PERIOD_S", 0.05)
    monkeypatch.setattr(runner, "RETRY_S", 0.1)


class Server(OneProcess):
    async def begin(self, **fields: Any) -> dict[str, Any]:
        headers = fields.pop("headers", {})
        body = {"input": "hi", "background": True, "max_output_tokens": 30, "seed": 5, **fields}
        reply = await self.http.post(PATH, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        Response.model_validate(found)
        assert found["status"] == "queued" and found["background"] and found["store"]
        return found

    async def get(self, name: str, **headers: str) -> dict[str, Any]:
        reply = await self.http.get(f"{PATH}/{name}", headers=headers)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        Response.model_validate(found)
        return found

    async def end_of(self, name: str, **headers: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (found := await self.get(name, **headers))["status"] == "in_progress":
                await asyncio.sleep(0.02)
        return found


def text_of(response: dict[str, Any]) -> str:
    text: str = response["output"][0]["content"][0]["text"]
    return text


async def undisturbed(server: Server) -> str:
    body = {"input": "hi", "max_output_tokens": 30, "seed": 5}
    return text_of((await server.http.post(PATH, json=body)).json())


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())


def test_it_is_made_and_can_be_gone_on_from(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            made = await server.begin()
            end = await server.end_of(made["id"])
            assert end["status"] == "incomplete" and text_of(end) == await undisturbed(server)
            assert end["usage"]["output_tokens"] == 30
            body = {"input": "go on", "previous_response_id": made["id"]}
            assert (await server.http.post(PATH, json=body)).status_code == 200
            stream = await server.http.get(f"{PATH}/{made['id']}", params={"stream": "true"})
            events = [
                json.loads(part.split("data: ")[1]) for part in stream.text.split("\n\n")[:-1]
            ]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            after = {"stream": "true", "starting_after": "6"}
            rest = await server.http.get(f"{PATH}/{made['id']}", params=after)
            assert stream.text.endswith(rest.text)
            assert json.loads(rest.text.split("data: ")[1].split("\n")[0])["sequence_number"] == 7

    run(scenario)


@pytest.mark.parametrize("times", [1, 3])
def test_another_process_takes_it_up(tmp_path: Path, times: int) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as last:
            want = await undisturbed(last)
            await last.lose()
        names = []
        for _ in range(times):
            async with Server(tmp_path) as lost:
                lost.client.step_s = 0.05
                names.append((await lost.begin())["id"])
                await asyncio.sleep(0.3)
                await lost.lose()
            await asyncio.sleep(LEASE_S)
        async with Server(tmp_path) as one, Server(tmp_path) as other:
            for name in names:
                assert text_of(await other.end_of(name)) == want
            assert len(one.client.started) + len(other.client.started) == times, "made twice"

    run(scenario)


def test_a_stream_whose_client_leaves_is_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            server.client.step_s = 0.01
            body = {"input": "hi", "background": True, "stream": True, "seed": 5}
            body["max_output_tokens"] = 30
            sent: list[bytes] = []
            some = asyncio.Event()

            async def send(message: Any) -> None:
                sent.append(message.get("body", b""))
                if len(sent) > 8:
                    some.set()

            async def receive() -> Any:
                if not some.is_set() and not sent and not asked:
                    asked.append(True)
                    content = json.dumps(body).encode()
                    return {"type": "http.request", "body": content, "more_body": False}
                await some.wait()
                return {"type": "http.disconnect"}

            asked: list[bool] = []
            headers = [(b"host", b"test"), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
            scope |= {"query_string": b"", "headers": headers, "root_path": ""}
            await server.app(scope, receive, send)
            first = json.loads(b"".join(sent).split(b"data: ")[1].split(b"\n")[0])
            end = await server.end_of(first["response"]["id"])
            assert text_of(end) == await undisturbed(server)

    run(scenario)


def test_it_is_cancelled(tmp_path: Path) -> None:
    """By whichever process; it isn't taken up then, and a deleted one neither."""

    async def scenario() -> None:
        async with Server(tmp_path) as server, Server(tmp_path) as other:
            server.client.step_s = 0.05
            made, gone = await server.begin(), await server.begin()
            await asyncio.sleep(0.2)
            for _ in range(2):
                reply = await other.http.post(f"{PATH}/{made['id']}/cancel")
                assert reply.status_code == 200 and reply.json()["status"] == "cancelled"
            assert (await other.http.delete(f"{PATH}/{gone['id']}")).status_code == 200
            for client in (server.client, other.client):  # as between processes
                await client.abort(made["id"], "")
                await client.abort(gone["id"], "")
            await asyncio.sleep(2 * LEASE_S)
            assert (await server.get(made["id"]))["status"] == "cancelled"
            again = await server.http.get(f"{PATH}/{made['id']}", params={"stream": "true"})
            assert again.status_code == 400 and "cancelled" in again.json()["error"]["message"]
            assert server.client.open == 0 and not other.client.started
            body = {"input": "x", "previous_response_id": made["id"]}
            assert (await server.http.post(PATH, json=body)).status_code == 400
            server.client.step_s = 0.0
            done = (await server.begin())["id"]
            await server.end_of(done)
            reply = await server.http.post(f"{PATH}/{done}/cancel")
            assert reply.status_code == 400 and "ended" in reply.json()["error"]["message"]

    run(scenario)


def test_what_fails(tmp_path: Path) -> None:
    """An error of its own ends it; engines that are away are waited for."""

    async def scenario() -> None:
        async with Server(tmp_path) as server:
            want = await undisturbed(server)
            server.client.error_at = (3, RuntimeError("lost"))
            end = await server.end_of((await server.begin())["id"])
            assert end["status"] == "failed" and "error" in end["error"]["message"]
            for error in (EngineDeadError("away"), RequestError("the queue is full", status=429)):
                server.client.error_at = (3, error)
                name = (await server.begin())["id"]
                await asyncio.sleep(0.5)
                assert (await server.get(name))["status"] == "in_progress"
                server.client.error_at = None
                assert text_of(await server.end_of(name)) == want

    run(scenario)


def test_what_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            for body, param in (
                ({"input": "x", "background": True, "store": False}, "background"),
                (
                    {"input": "x", "background": True, "max_output_tokens": 10**6},
                    "max_output_tokens",
                ),
                ({"input": "x", "background": True, "previous_response_id": "no"}, None),
            ):
                reply = await server.http.post(PATH, json=body)
                assert reply.status_code in (400, 404)
                assert param is None or reply.json()["error"]["param"] == param
            assert await server.app.state.store.take_up([""]) == []
        none = Server(tmp_path, request_store="none")
        reply = await none.http.post(PATH, json={"input": "x", "background": True})
        assert reply.status_code == 400 and "request_store" in reply.json()["error"]["message"]

    run(scenario)


def test_its_key(tmp_path: Path) -> None:
    """It runs as the key that asked, also after a restart; without the key it fails."""
    file = write_keys(tmp_path / "keys.yaml", entry("a"), entry("b"))

    async def scenario() -> None:
        async with Server(tmp_path, api_keys_file=file) as server:
            server.client.step_s = 0.05
            names = [(await server.begin(headers=bearer(key)))["id"] for key in "ab"]
            await asyncio.sleep(0.1)
            await server.lose()
        write_keys(tmp_path / "keys.yaml", entry("a"), entry("c", role="admin"))
        async with Server(tmp_path, api_keys_file=file) as server:
            await server.end_of(names[0], **bearer("a"))
            (started,) = server.client.started
            assert started.namespace == "a/"
            async with asyncio.timeout(20):
                while (await server.app.state.store.get(names[1], "b")).has_ended is False:
                    await asyncio.sleep(0.02)
            record = await server.app.state.store.get(names[1], "b")
            assert record.response["status"] == "failed"

    run(scenario)


def test_after_each_write_of_the_store(tmp_path: Path) -> None:
    """The process ends after any of the store's writes: what it promised is there in the end, and
    what it left can be read on."""

    async def life(path: Path, last_write: int) -> tuple[int, list[str]]:
        """Serve two responses in the background and one stream, until so many writes were made.
        Returns the number of writes and the ids that clients got."""
        server = Server(path)
        store = server.app.state.store
        work, writes, names, is_over = store._run, 0, [], asyncio.Event()

        async def counted(write: Any) -> Any:
            nonlocal writes
            if writes >= last_write:
                await is_over.wait()  # the process is dead
                raise asyncio.CancelledError
            found = await work(write)
            writes += write.__name__ in ("write", "remove")
            return found

        store._run = counted
        async with server:
            tasks = [asyncio.create_task(server.begin()) for _ in range(2)]
            stream = asyncio.create_task(
                server.http.post(PATH, json={"input": "s", "stream": True, "seed": 5})
            )
            await asyncio.wait([*tasks, stream], timeout=0.7)
            names = [task.result()["id"] for task in tasks if task.done()]
            is_over.set()
            for task in (*tasks, stream):
                task.cancel()
            await asyncio.gather(*tasks, stream, return_exceptions=True)
            await server.lose()
            store._run = work
        return writes, names

    async def scenario() -> None:
        total, _ = await life(tmp_path / "whole", 10**6)
        assert total >= 6
        async with Server(tmp_path / "other") as other:
            want = await undisturbed(other)
        for last_write in range(total):
            path = tmp_path / str(last_write)
            _, names = await life(path, last_write)
            await asyncio.sleep(LEASE_S)
            async with Server(path) as server:
                for name in names:
                    assert text_of(await server.end_of(name)) == want, last_write
                await asyncio.sleep(0.2)
                records = await server.app.state.store._run(
                    lambda connection: connection.execute(
                        "SELECT id FROM records WHERE ended = 0"
                    ).fetchall()
                )
                for (name,) in records:
                    await server.end_of(name)

    run(scenario)
