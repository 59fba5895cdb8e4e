"""Responses that are kept: conversations that go on from them, what is read, and who may."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.http.records import store
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.kept_server import Server, options, run, serve

PATH = "/v1/responses"


def test_a_conversation_goes_on(tmp_path: Path) -> None:
    """Over any number of responses, streamed or not, after a restart and at another ingress."""
    ids: list[str] = []

    async def begin(server: Server) -> None:
        first = await server.respond("one", instructions="be brief")
        assert first["store"] is True and first["previous_response_id"] is None
        body = {"input": "two", "stream": True, "previous_response_id": first["id"]}
        reply = await server.http.post(PATH, json=body)
        end = json.loads(reply.text.strip().split("\n")[-1].removeprefix("data: "))
        assert end["type"] == "response.completed"
        second = end["response"]
        assert second["previous_response_id"] == first["id"] and second["store"] is True
        # Instructions aren't taken over.
        assert server.conversation == [("user", "one"), ("assistant", "fine"), ("user", "two")]
        ids.extend([first["id"], second["id"]])

    async def go_on(server: Server) -> None:
        items = [{"role": "user", "content": [{"type": "input_text", "text": "three"}]}]
        third = await server.respond(items, previous_response_id=ids[1], instructions="now")
        whole = [("system", "now"), ("user", "one"), ("assistant", "fine"), ("user", "two")]
        whole += [("assistant", "fine"), ("user", "three")]
        assert server.conversation == whole
        other = await server.respond("other", previous_response_id=ids[0])  # a branch
        assert server.conversation == [*whole[1:3], ("user", "other")]
        assert third["usage"]["input_tokens"] > other["usage"]["input_tokens"]
        counted = await server.http.post(
            f"{PATH}/input_tokens", json={"input": "other", "previous_response_id": ids[0]}
        )
        assert counted.json()["input_tokens"] == other["usage"]["input_tokens"]

    async def beside(server: Server) -> None:
        async with serve(options(tmp_path)) as another:
            first = await server.respond("one")
            await another.respond("two", previous_response_id=first["id"])
            assert another.conversation[0] == ("user", "one")

    run(options(tmp_path), begin)
    run(options(tmp_path), go_on)
    run(options(tmp_path), beside)


def test_calls_and_their_results_go_on(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        server.client.script = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        first = await server.respond("hi", tools=[tool])
        (call,) = first["output"]
        assert call["type"] == "function_call"
        server.client.script = "done"
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        await server.respond([result], tools=[tool], previous_response_id=first["id"])
        messages = server.messages
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[1]["tool_calls"][0]["function"]["name"] == "f"
        assert messages[2]["content"] == "7"

    run(options(tmp_path), scenario)


def test_what_is_read_and_deleted(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        made = await server.respond(
            [{"role": "user", "content": f"part {n}"} for n in range(5)], metadata={"a": "b"}
        )
        at = f"{PATH}/{made['id']}"
        assert (await server.http.get(at)).json() == made
        page = (await server.http.get(f"{at}/input_items", params={"limit": 2})).json()
        texts = [item["content"][0]["text"] for item in page["data"]]
        assert texts == ["part 4", "part 3"] and page["has_more"]
        query = {"after": page["last_id"], "limit": 100}
        page = (await server.http.get(f"{at}/input_items", params=query)).json()
        assert [item["content"][0]["text"] for item in page["data"]] == [
            "part 2", "part 1", "part 0",
        ]  # fmt: skip
        assert not page["has_more"] and page["data"][0]["content"][0]["type"] == "input_text"
        for query, param in (
            ({"limit": "0"}, "limit"),
            ({"limit": "x"}, "limit"),
            ({"limit": "9" * 5000}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "none"}, "after"),
        ):
            status, error = await server.refusal("GET", f"{at}/input_items", params=query)
            assert (status, error["param"]) == (400, param)
        status, error = await server.refusal("GET", at, params={"stream": "maybe"})
        assert (status, error["param"]) == (400, "stream")
        status, error = await server.refusal("POST", f"{at}/cancel")
        assert status == 400 and "background" in error["message"]
        gone = (await server.http.delete(at)).json()
        assert gone == {"id": made["id"], "object": "response", "deleted": True}
        for method, path in (
            ("GET", at),
            ("DELETE", at),
            ("GET", f"{at}/input_items"),
            ("POST", f"{at}/cancel"),
        ):
            status, error = await server.refusal(method, path)
            assert (status, error["code"]) == (404, "response_not_found")
        body = {"input": "x", "previous_response_id": made["id"]}
        status, error = await server.refusal("POST", PATH, json=body)
        assert (status, error["param"]) == (404, "previous_response_id")

    run(options(tmp_path), scenario)


def test_what_is_not_kept(tmp_path: Path) -> None:
    """Who says so, what failed, and what its client left."""

    async def scenario(server: Server) -> None:
        made = await server.respond("x", store=False)
        assert made["store"] is False
        status, _ = await server.refusal("GET", f"{PATH}/{made['id']}")
        assert status == 404
        server.client.error_at = (0, RuntimeError("lost"))
        await server.refusal("POST", PATH, json={"input": "x"})
        await asyncio.sleep(0.2)

    run(options(tmp_path), scenario)
    with sqlite3.connect(tmp_path / "store" / "records.sqlite3") as connection:
        assert connection.execute("SELECT COUNT(*) FROM records").fetchone() == (0,)


def test_while_it_is_computed(tmp_path: Path) -> None:
    """It can be seen and deleted; nothing goes on from it before its end."""

    async def scenario(server: Server) -> None:
        server.client.script, server.client.step_s = None, 0.02
        body = {"input": "x", "stream": True, "max_output_tokens": 30}
        path = tmp_path / "store" / "records.sqlite3"

        async def new_id(known: set[str]) -> str:
            while True:
                await asyncio.sleep(0.02)
                if path.exists():
                    with suppress(sqlite3.OperationalError), sqlite3.connect(path) as connection:
                        ids = {row[0] for row in connection.execute("SELECT id FROM records")}
                        if ids - known:
                            return (ids - known).pop()

        running = asyncio.create_task(server.http.post(PATH, json=body))
        kept = await new_id(set())
        assert (await server.http.get(f"{PATH}/{kept}")).json()["status"] == "in_progress"
        follow = {"input": "y", "previous_response_id": kept}
        status, error = await server.refusal("POST", PATH, json=follow)
        assert status == 400 and "not ended" in error["message"]
        await running
        assert (await server.http.get(f"{PATH}/{kept}")).json()["status"] != "in_progress"
        running = asyncio.create_task(server.http.post(PATH, json=body))
        gone = await new_id({kept})
        assert (await server.http.delete(f"{PATH}/{gone}")).status_code == 200
        assert (await running).status_code == 200
        status, _ = await server.refusal("GET", f"{PATH}/{gone}")
        assert status == 404

    run(options(tmp_path), scenario)


def test_a_server_without_a_store(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        made = await server.respond("x", store=True)
        assert made["store"] is False
        status, _ = await server.refusal("GET", f"{PATH}/{made['id']}")
        assert status == 404
        body = {"input": "x", "previous_response_id": made["id"]}
        status, error = await server.refusal("POST", PATH, json=body)
        assert (status, error["param"]) == (400, "previous_response_id")
        assert "request_store" in error["message"]

    run(options(tmp_path, request_store="none"), scenario)
    assert not (tmp_path / "store").exists()


def test_another_key_sees_nothing(tmp_path: Path) -> None:
    """Nor does it reach a record by giving its request the same id."""
    file = write_keys(tmp_path / "keys.yaml", entry("a"), entry("b"))
    headers = {name: bearer(name) for name in "ab"}

    async def scenario(server: Server) -> None:
        same = {"x-request-id": "shared"}
        mine = await server.respond("mine", headers={**headers["a"], **same})
        status, _ = await server.refusal("GET", f"{PATH}/{mine['id']}", headers=headers["b"])
        assert status == 404
        status, _ = await server.refusal("DELETE", f"{PATH}/{mine['id']}", headers=headers["b"])
        assert status == 404
        body = {"input": "x", "previous_response_id": mine["id"]}
        status, _ = await server.refusal("POST", PATH, json=body, headers=headers["b"])
        assert status == 404
        status, _ = await server.refusal("GET", f"{PATH}/{mine['id']}")
        assert status == 401
        theirs = await server.respond("theirs", headers={**headers["b"], **same})
        assert theirs["id"] != mine["id"]
        again = await server.respond("mine", headers={**headers["a"], **same})
        assert again["id"] != mine["id"]
        kept = (await server.http.get(f"{PATH}/{mine['id']}", headers=headers["a"])).json()
        assert kept == mine

    run(options(tmp_path, api_keys_file=file), scenario)


def test_a_store_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever insists is refused at once, others hear it; well again with the store."""
    monkeypatch.setattr(store, "AWAY_S", 0.0)
    server = options(tmp_path)
    at = Path(server.request_store_path or "")

    async def scenario(running: Server) -> None:
        at.parent.write_text("a file where a folder must be")
        body = {"input": "x", "store": True}
        status, error = await running.refusal("POST", PATH, json=body)
        assert (status, error["code"]) == (503, "store_unavailable")
        assert "store: false" in error["message"]
        assert (await running.respond("x"))["store"] is False
        at.parent.unlink()
        made = await running.respond("x")
        with sqlite3.connect(at) as connection:
            connection.execute("DROP TABLE records")
        status, error = await running.refusal("GET", f"{PATH}/{made['id']}")
        assert (status, error["code"]) == (503, "store_unavailable")

    run(server, scenario)
    assert "can't be kept" in caplog.text
    assert "file where" not in caplog.text
