"""Chat completions that are stored: with OpenAI's client, and who may see them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from deploy.http.openai.replies import ChatCompletion, ChatCompletions, StoredMessages
from deploy.http.records.sqlite_store import SqliteStore
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.kept_server import Server, options, run

PATH = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=server.http, max_retries=0
    )


async def listed(server: Server, **query: Any) -> list[str]:
    """Ids of a page."""
    reply = await server.http.get(PATH, params=query)
    assert reply.status_code == 200, reply.text
    ChatCompletions.model_validate(reply.json())
    return [one["id"] for one in reply.json()["data"]]


def test_openais_client(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        chats = client_of(server).chat.completions
        made = [
            await chats.create(
                model="fake", messages=HI, store=True, metadata={"n": str(n), "odd": str(n % 2)}
            )
            for n in range(5)
        ]
        other = await chats.create(model="fake", messages=HI)
        every = [one.id async for one in chats.list(limit=2)]
        assert every == [one.id for one in made] and other.id not in every
        assert [one.id async for one in chats.list(order="desc")] == every[::-1]
        odd = [one.id async for one in chats.list(metadata={"odd": "1"}, limit=1)]
        assert odd == [every[1], every[3]]
        assert [one async for one in chats.list(metadata={"odd": "1", "n": "2"})] == []
        assert [one.id async for one in chats.list(model=made[0].model)] == every
        assert [one async for one in chats.list(model="other")] == []
        found = await chats.retrieve(every[1])
        assert found == made[1] and found.metadata == {"n": "1", "odd": "1"}
        changed = await chats.update(every[1], metadata={"odd": "no"})
        assert changed.metadata == {"odd": "no"} and changed.choices == found.choices
        assert (await chats.retrieve(every[1])) == changed
        assert [one.id async for one in chats.list(metadata={"odd": "1"})] == [every[3]]
        gone = await chats.delete(every[0])
        assert gone.deleted and gone.id == every[0] and gone.object == "chat.completion.deleted"
        with pytest.raises(openai.NotFoundError):
            await chats.retrieve(every[0])
        assert [one.id async for one in chats.list(limit=3)] == every[1:]

    run(options(tmp_path), scenario)


def test_messages(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    parts = [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
        {"role": "user", "content": "and?"},
    ]

    async def scenario(server: Server) -> None:
        chats = client_of(server).chat.completions
        made = await chats.create(model="fake", messages=messages, store=True)
        found = [one async for one in chats.messages.list(made.id, limit=2)]
        assert [one.id for one in found] == [f"{made.id}-{n}" for n in range(5)]
        assert [one.content for one in found] == ["be brief", None, "", "7", "and?"]
        shown = [part.model_dump(exclude_unset=True) for part in found[1].content_parts or []]
        assert shown == parts and found[0].content_parts is None
        reply = (await server.http.get(f"{PATH}/{made.id}/messages?order=desc")).json()
        StoredMessages.model_validate(reply)
        assert reply["first_id"] == found[-1].id and not reply["has_more"]
        by_role = {one["role"]: one for one in reply["data"]}
        assert by_role["assistant"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        assert by_role["tool"]["tool_call_id"] == "c"
        with pytest.raises(openai.BadRequestError, match="id of an item"):
            await chats.messages.list(made.id, after="no")

    run(options(tmp_path), scenario)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMS: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1, "return_token_ids": True},
    {"logprobs": True, "top_logprobs": 2, "stream_interval": 3},
    {"tools": [TOOL]},
    {"stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_is_stored_as_the_reply_that_it_would_have_been(
    form: dict[str, Any], tmp_path: Path
) -> None:
    async def scenario(server: Server) -> None:
        if "tools" in form:
            server.client.script = 'so <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        else:
            server.client.script = None
        body = {"messages": HI, "store": True, "max_tokens": 20, "metadata": {"a": "b"}, **form}
        with_ids = {"accept": "text/event-stream"}
        streamed = await server.http.post(PATH, json={**body, "stream": True}, headers=with_ids)
        assert streamed.status_code == 200, streamed.text
        first = json.loads(streamed.text.split("\n")[1].removeprefix("data: "))
        assert first["object"] == "chat.completion.chunk"
        at = f"{PATH}/{first['id']}"
        kept = (await server.http.get(at)).json()
        ChatCompletion.model_validate(kept)
        assert await listed(server) == [kept["id"]]
        if "n" not in form:  # the order of several may be another one
            again = await server.http.get(at, params={"stream": "true"})
            assert again.text == streamed.text
        assert (await server.http.get(at)).json() == kept
        # Made once more, from the record alone.
        store = SqliteStore(tmp_path / "store" / "records.sqlite3", 3600.0, 1 << 24)
        record = await store.get(kept["id"], "")
        record.response, record.has_ended = None, False
        await store.add(record)
        await store.close()
        assert await listed(server) == []
        again = (await server.http.get(at)).json()
        cached = again["usage"]["prompt_tokens_details"], kept["usage"]["prompt_tokens_details"]
        cached[0].update(cached[1])
        assert again == kept
        assert await listed(server) == [kept["id"]], "who read it has ended it"

    run(options(tmp_path), scenario)


def test_what_is_refused(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        for body, param in (
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"metadata": {str(n): "" for n in range(65)}}, "metadata"),
            ({"request_id": "a/b"}, "request_id"),
        ):
            sent = {"messages": HI, "store": True, **body}
            status, error = await server.refusal("POST", PATH, json=sent)
            assert (status, error["param"]) == (400, param)
        for query, param in (({"limit": "0"}, "limit"), ({"order": "up"}, "order")):
            status, error = await server.refusal("GET", PATH, params=query)
            assert (status, error["param"]) == (400, param)
        status, error = await server.refusal("GET", PATH, params={"after": "no"})
        assert (status, error["param"]) == (404, "after")
        made = await server.http.post(PATH, json={"messages": HI, "store": True})
        at = f"{PATH}/{made.json()['id']}"
        assert made.json()["metadata"] == {}
        status, error = await server.refusal("POST", at, json={"metadata": {"a": 1}})
        assert (status, error["param"]) == (400, "metadata.a")
        # A stream that is kept is no stored completion.
        body = {"messages": HI, "stream": True, "request_id": "s"}
        assert (await server.http.post(PATH, json=body)).status_code == 200
        assert (await server.http.get(f"{PATH}/chatcmpl-s")).status_code == 200
        for method, path, given in (
            ("POST", f"{PATH}/chatcmpl-s", {"metadata": {}}),
            ("GET", f"{PATH}/chatcmpl-s/messages", None),
            ("POST", f"{PATH}/none", {"metadata": {}}),
        ):
            status, _ = await server.refusal(method, path, json=given)
            assert status == 404
        assert await listed(server) == [made.json()["id"]]

    run(options(tmp_path), scenario)


def test_what_fails_or_is_left_isnt_listed(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        body = {"messages": HI, "store": True, "request_id": "r"}
        server.client.error_at = (0, RuntimeError("lost"))
        await server.refusal("POST", PATH, json=body)
        server.client.error_at = None
        assert await listed(server) == []
        server.client.script, server.client.step_s = None, 0.01
        left = asyncio.create_task(server.http.post(PATH, json={**body, "max_tokens": 4000}))
        while not server.client.started:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert await listed(server) == []

    run(options(tmp_path), scenario)


def test_a_server_without_a_store(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        made = await server.http.post(PATH, json={"messages": HI, "store": True})
        assert "metadata" not in made.json()
        assert await listed(server) == []
        status, _ = await server.refusal("GET", f"{PATH}/{made.json()['id']}")
        assert status == 404

    run(options(tmp_path, request_store="none"), scenario)


def test_a_store_that_fails(tmp_path: Path) -> None:
    """Nothing runs that couldn't be stored."""
    server = options(tmp_path)
    Path(server.request_store_path or "").parent.write_text("a file where a folder must be")

    async def scenario(running: Server) -> None:
        for stream in (False, True):
            body = {"messages": HI, "store": True, "stream": stream}
            status, error = await running.refusal("POST", PATH, json=body)
            assert (status, error["code"]) == (503, "store_unavailable")

    run(server, scenario)


def test_another_key_sees_nothing(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.yaml", entry("a"), entry("b"))
    mine, other = bearer("a"), bearer("b")

    async def scenario(server: Server) -> None:
        body = {"messages": HI, "store": True, "request_id": "r"}
        made = await server.http.post(PATH, json=body, headers=mine)
        at = f"{PATH}/{made.json()['id']}"
        assert (await server.http.get(PATH, headers=other)).json()["data"] == []
        for method, path in (("GET", at), ("DELETE", at), ("GET", f"{at}/messages"), ("POST", at)):
            given = {"metadata": {}} if method == "POST" else None
            status, _ = await server.refusal(method, path, headers=other, json=given)
            assert status == 404
            status, _ = await server.refusal(method, path, json=given)
            assert status == 401
        found = (await server.http.get(PATH, headers=mine)).json()
        assert found["data"] == [made.json()]

    run(options(tmp_path, api_keys_file=file), scenario)
