"""Streams that are read on: the same events, whoever answers, from any place."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.api import build_api
from deploy.http.generation.endpoint import MAX_KEPT
from deploy.http.generation.event_numbers import EventNumbers, read_place
from deploy.http.records import keeper
from deploy.http.records.sqlite_store import SqliteStore
from deploy.http.records.store import Record
from deploy.http.records.token_log import AnswerTokens, read_tokens
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from engine.errors import RequestError
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import TextDelta
from tests.support.api_keys import bearer, entry, write_keys
from tests.support.fake_client import FakeEngineClient

SCRIPT = (
    "<think>\nlet me see\n</think>\n\nI look it up."
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "two"]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"text": "so\\nit is"}}\n</tool_call>'
)
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
FUNCTIONS = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in "fg"]
TOOLS = [{"type": "function", "name": n, "parameters": SCHEMA} for n in "fg"]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40}),
    "chat with tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": FUNCTIONS, "stream_options": USAGE},
    ),
    "two chats": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 20, "n": 2, "logprobs": True, "top_logprobs": 2},
    ),
    "chat in steps": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": FUNCTIONS, "stream_interval": 7, "return_token_ids": True},
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 15, "echo": True, "logprobs": 1},
    ),
    "message": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 400,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": n, "input_schema": SCHEMA} for n in "fg"],
        },
    ),
    "response": ("/v1/responses", {"input": "hi", "tools": TOOLS}),
    "response with logprobs": (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 30, "include": ["message.output_text.logprobs"]},
    ),
}
GENERATE = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}


class BatchingClient(FakeEngineClient):
    """Deltas come one by one or several at a time, as `rng` has it."""

    rng: random.Random | None = None

    async def generate(
        self,
        request: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        if self.rng is None:
            await super().generate(request, read, known_ids)
            return
        waiting: list[TextDelta] = []
        async for delta in self._deltas(request, known_ids):
            waiting.append(delta)
            if self.rng.random() < 0.3 or delta.finish_reason is not None:
                read(waiting)
                waiting = []


class Server:
    """The application, called without a client library: its reader may be slow."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.client = BatchingClient(4096, tool_format="hermes", reasons=True)
        self.client.script = None
        server = ServerOptions(request_store_path=str(path / "r.sqlite3"), **options)
        self.app = build_api(lambda: ServedModels(self.client), ApiSettings(server))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"accept": "text/event-stream"}
        )

    async def begin(self, path: str, body: dict[str, Any], **headers: str) -> list[str]:
        """The events of a new stream. A response in JSON is one."""
        reply = await self.http.post(path, json={**body, "stream": True}, headers=headers)
        assert reply.status_code == 200, reply.text
        await asyncio.sleep(0.02)  # the end is written beside
        return events_of(reply.text)

    async def read_on(self, path: str, last: str = "", slow: random.Random | None = None) -> str:
        """The rest of a stream whose reader takes its time."""
        record = last.rpartition(":")[0] if last else path.rpartition("/")[2]
        path = path if not last else f"{path}/{record}"
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200
                return
            if slow is not None:
                for _ in range(slow.randrange(12)):
                    await asyncio.sleep(0)
            sent.append(message["body"])

        async def receive() -> Any:
            await asyncio.Event().wait()

        headers = [(b"host", b"test"), (b"last-event-id", last.encode())]
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"stream=true",
            "headers": headers,
            "app": self.app,
            "root_path": "",
        }
        await self.app(scope, receive, send)
        return b"".join(sent).decode()

    async def close(self) -> None:
        await self.http.aclose()
        if self.app.state.store is not None:
            await self.app.state.runner.stop()
            await self.app.state.store.close()


def events_of(text: str) -> list[str]:
    assert text == "" or text.endswith("\n\n")
    return text.split("\n\n")[:-1]


def id_of(event: str) -> str:
    (line,) = [line for line in event.split("\n") if line.startswith("id: ")]
    return line.removeprefix("id: ")


def data_of(event: str) -> str:
    return "\n".join(line for line in event.split("\n") if not line.startswith("id: "))


def run(server: Server, scenario: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        try:
            await scenario()
        finally:
            await server.close()

    asyncio.run(all_of_it())


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 2**32), scripted=st.booleans())
@settings(max_examples=12)
def test_the_same_events(
    name: str, seed: int, scripted: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However deltas come, and however slowly they are read; none twice, and none missing."""
    path, body = CASES[name]
    server = Server(tmp_path_factory.mktemp("store"))
    server.client.script = SCRIPT if scripted else None
    rng = random.Random(seed)

    async def scenario() -> None:
        events = await server.begin(path, body)
        server.client.rng = rng
        store = server.app.state.store

        async def some_tokens(record: Record) -> bytes:
            """As if the process had been lost somewhere."""
            known = read_tokens(await SqliteStore.tokens_of(store, record), MAX_KEPT)
            answer = AnswerTokens(record, MAX_KEPT, ())
            for index, ids in enumerate(known):
                answer.add(index, ids[: rng.choice([len(ids), rng.randint(0, len(ids))])])
            return answer.take()

        store.tokens_of = some_tokens
        for place in {0, rng.randrange(len(events)), len(events) - 1}:
            rest = events_of(await server.read_on(path, id_of(events[place]), rng))
            had = events[: place + 1]
            if len(rest) > 1:  # and once more
                had += rest[: rng.randrange(1, len(rest))]
                rest = events_of(await server.read_on(path, id_of(had[-1]), rng))
            if len({id_of(event).count(".") for event in events}) > 1 or "." in id_of(events[0]):
                # Sequences may come in another order, and their places with it.
                want = Counter(map(data_of, events))
                assert Counter(map(data_of, had + rest)) == want
                assert data_of(rest[-1]) == data_of(events[-1]) if rest else place + 1
            else:
                assert had + rest == events

    run(server, scenario)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=12)
def test_events_that_hold_all_before_them(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SGLang's: the last one of each sequence is the same, and no place comes twice."""
    server, rng = Server(tmp_path_factory.mktemp("store")), random.Random(seed)

    def last(events: list[str]) -> dict[int, Any]:
        found = {}
        for event in events:
            data = data_of(event).removeprefix("data: ")
            if data != "[DONE]":
                item = json.loads(data)
                item["meta_info"].pop("e2e_latency", None)
                found[item["index"]] = item
        return found

    async def scenario() -> None:
        server.client.rng = rng
        events = await server.begin("/generate", GENERATE)
        place = rng.randrange(len(events))
        rest = events_of(await server.read_on("/generate", id_of(events[place]), rng))
        assert last(events[: place + 1] + rest) == last(events)
        ids = [id_of(event) for event in [events[place], *rest]]
        assert len(set(ids)) == len(ids)

    run(server, scenario)


@given(
    sequences=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    cut=st.integers(0, 40),
    data=st.data(),
)
def test_numbers(sequences: list[int], cut: int, data: st.DataObject) -> None:
    """Whatever the order of sequences, before the cut and after it."""
    each = [b"data: %d %d\n\n" % (s, n) for n, s in enumerate(sequences)]
    order = list(enumerate(sequences))
    first = EventNumbers("r", 4, shown=True)
    seen = b"".join(first.of_each(s, each[n]) for n, s in order[:cut]).decode()
    ids = [line.rpartition(":")[2] for line in seen.split("\n") if line.startswith("id: ")]
    place = read_place(ids[-1], "x") if ids else None
    again = EventNumbers("r", 4, place, shown=False)
    queues = [[n for n, s in order if s == sequence] for sequence in range(4)]
    rest = b""
    while any(queues):
        sequence = data.draw(st.sampled_from([s for s in range(4) if queues[s]]))
        rest += again.of_each(sequence, each[queues[sequence].pop(0)])
    again.check_end()
    had = b"".join(each[: min(cut, len(each))])
    assert sorted(events_of((had + rest).decode())) == sorted(events_of(b"".join(each).decode()))


def test_what_is_refused(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.yaml", entry("a"), entry("b"))
    server = Server(tmp_path, api_keys_file=file)
    path, body = CASES["two chats"]

    async def refused(path: str, key: str, **more: Any) -> tuple[int, dict[str, Any]]:
        headers = {**bearer(key), **more.pop("headers", {})}
        reply = await server.http.get(path, headers=headers, params={"stream": "true", **more})
        assert reply.status_code >= 400, reply.text
        return reply.status_code, reply.json()["error"]

    async def scenario() -> None:
        events = await server.begin(path, body, **bearer("a"))
        at = id_of(events[-1]).rpartition(":")[0]
        for name, key in ((at, "b"), ("chatcmpl-none", "a"), ("x" * 5000, "a"), ("%00", "a")):
            status, error = await refused(f"{path}/{name}", key)
            assert (status, error["code"]) == (404, "response_not_found"), name
        status, _ = await refused(f"/v1/completions/{at}", "a")
        assert status == 404
        for text in ("", "x", "-1", "1.", "1" * 50, "1,2", "٣", "1.2.3", "1", ".".join("1" * 5000)):
            last = {"last-event-id": f"{at}:{text}".encode()}
            status, error = await refused(f"{path}/{at}", "a", headers=last)
            assert (status, error["param"]) == (400, "Last-Event-ID"), text
        last = {"last-event-id": "chatcmpl-other:1.1"}
        status, error = await refused(f"{path}/{at}", "a", headers=last)
        assert (status, error["param"]) == (400, "Last-Event-ID")
        status, error = await refused(f"{path}/{at}", "a", starting_after="999999.999999")
        assert status == 400 and "behind the end" in error["message"]
        far = {"starting_after": "99999.1", "stream": "true"}
        reply = await server.http.get(f"{path}/{at}", headers=bearer("a"), params=far)
        assert "behind the end" in reply.text.strip().split("\n\n")[-1]
        status, error = await refused(f"{path}/{at}", "a", starting_after="x")
        assert (status, error["param"]) == (400, "starting_after")
        server.client._info = replace(server.client._info, digest="other weights")
        status, error = await refused(f"{path}/{at}", "a")
        assert (status, error["code"]) == (409, "other_model")
        gone = await server.http.delete(f"{path}/{at}", headers=bearer("b"))
        assert gone.status_code == 404
        gone = await server.http.delete(f"{path}/{at}", headers=bearer("a"))
        assert gone.json() == {
            "id": at.partition("~")[0],
            "object": "chat.completion.deleted",
            "deleted": True,
        }
        status, _ = await refused(f"{path}/{at}", "a")
        assert status == 404

    run(server, scenario)


def test_what_is_not_kept(tmp_path: Path) -> None:
    """And who gets ids: clients that say that they read them, and all where events have names."""
    server = Server(tmp_path)
    path, body = CASES["chat"]

    async def scenario() -> None:
        for more in ({"store": False}, {"messages": []}):
            reply = await server.http.post(path, json={**body, "stream": True, **more})
            assert "id: chatcmpl" not in reply.text
        plain = {"accept": "*/*"}
        reply = await server.http.post(path, json={**body, "stream": True}, headers=plain)
        first = json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))
        # The id is that of the reply, and whoever counts events knows the place.
        rest = await server.read_on(path, f"{first['id']}:3")
        assert list(map(data_of, events_of(rest))) == events_of(reply.text)[3:]
        path_of_messages, message = CASES["message"]
        events = await server.begin(path_of_messages, message, **plain)
        assert all("id: msg_" in event for event in events)
        reply = await server.http.post(path, json=body)  # not a stream
        assert (await server.http.get(f"{path}/{reply.json()['id']}")).status_code == 404

    run(server, scenario)
    none = Server(tmp_path / "none", request_store_stream_age_s=0)

    async def without() -> None:
        assert not any("id: " in event for event in await none.begin(path, body))

    run(none, without)


def test_each_api_words_its_errors(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def scenario() -> None:
        reply = await server.http.get("/generate/none")
        assert reply.status_code == 404 and set(reply.json()["error"]) == {"message"}
        reply = await server.http.delete("/v1/messages/none")
        assert reply.status_code == 404 and reply.json()["type"] == "error"

    run(server, scenario)


def test_a_request_that_is_sent_again(tmp_path: Path) -> None:
    """As clients of server-sent events do that can post."""
    server = Server(tmp_path)
    path, body = CASES["chat"]

    async def scenario() -> None:
        events = await server.begin(path, body)
        last = {"last-event-id": id_of(events[4])}
        assert await server.begin(path, body, **last) == events[5:]
        for wrong in ("chatcmpl-none:3", "x", "1", id_of(events[4]) + "x"):
            reply = await server.http.post(
                path, json={**body, "stream": True}, headers={"last-event-id": wrong}
            )
            assert reply.status_code in (400, 404), wrong

    run(server, scenario)


def test_two_requests_of_one_id(tmp_path: Path) -> None:
    """A place in the first stream never leads into the second."""
    server = Server(tmp_path)
    path, body = CASES["chat"]
    same = {"x-request-id": "shared"}

    async def scenario() -> None:
        first = await server.begin(path, body, **same)
        second = await server.begin(path, body, **same)
        assert [data_of(event) for event in first] != [data_of(event) for event in second]
        assert events_of(await server.read_on(path, id_of(second[4]))) == second[5:]
        place = {"last-event-id": id_of(first[4])}
        reply = await server.http.get(
            f"{path}/chatcmpl-shared", params={"stream": "true"}, headers=place
        )
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "Last-Event-ID")
        lost = id_of(first[4]).rpartition(":")[0]
        assert (await server.http.get(f"{path}/{lost}")).status_code == 404
        refused = await server.http.post(
            path, json={**body, "stream": True, "max_tokens": 10**6}, headers=same
        )
        assert refused.status_code == 400
        assert events_of(await server.read_on(path, id_of(second[4]))) == second[5:]

    run(server, scenario)


@pytest.mark.parametrize("case", ["chat", "response"])
def test_a_store_that_hangs_holds_up_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Nor does a stream that isn't kept say that it could be read on."""
    monkeypatch.setattr(keeper, "BEGIN_S", 0.05)
    server = Server(tmp_path)
    path, body = CASES[case]

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    server.app.state.store.add = never

    async def scenario() -> None:
        for _ in range(20):
            events = await server.begin(path, body, accept="text/event-stream")
            assert len(events) > 5 and not any("id: " in event for event in events)
        assert server.app.state.store.is_away

    run(server, scenario)


def test_a_store_that_does_what_others_asked_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of requests at once keep their process so busy that each waits long for its turn."""
    monkeypatch.setattr(keeper, "BEGIN_S", 1.0)
    server = Server(tmp_path)
    path, body = CASES["chat"]
    store = server.app.state.store
    add, turns = store.add, asyncio.Lock()

    async def add_by_turns(*given: Any, **named: Any) -> None:
        async with turns:
            await asyncio.sleep(0.1)
            await add(*given, **named)

    store.add = add_by_turns

    async def scenario() -> None:
        begun = [server.begin(path, body, accept="text/event-stream") for _ in range(20)]
        for events in await asyncio.gather(*begun):
            assert all(id_of(event) for event in events)
        assert not store.is_away

    run(server, scenario)


def test_a_client_that_left_comes_back(tmp_path: Path) -> None:
    """Also to another process, and while the first one still reads."""
    server, other = Server(tmp_path), Server(tmp_path)
    path, body = CASES["chat"]

    async def scenario() -> None:
        server.client.step_s = 0.01
        whole: list[bytes] = []
        begun = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                whole.append(message["body"])
                if len(whole) == 5:
                    begun.set()

        async def receive() -> Any:
            if not given:
                given.append(True)
                content = json.dumps({**body, "stream": True}).encode()
                return {"type": "http.request", "body": content, "more_body": False}
            await begun.wait()
            await leaves.wait()
            return {"type": "http.disconnect"}

        given: list[bool] = []
        leaves = asyncio.Event()
        headers = [
            *((b"host", b"test"), (b"content-type", b"application/json")),
            (b"accept", b"text/event-stream"),
        ]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "headers": headers, "root_path": ""}
        reading = asyncio.create_task(server.app(scope, receive, send))
        await begun.wait()
        had = events_of(b"".join(whole).decode())
        beside = events_of(await other.read_on(path, id_of(had[1])))
        leaves.set()
        await reading
        had = events_of(b"".join(whole).decode())
        assert had == [*had[:2], *beside][: len(had)]
        rest = events_of(await other.read_on(path, id_of(had[-1])))
        assert had[:2] + beside == had + rest
        assert json.loads(data_of(rest[-2])[6:])["choices"][0]["finish_reason"] == "length"
        record_id = id_of(had[0]).rpartition(":")[0]
        answer = (await other.http.get(f"{path}/{record_id}")).json()
        said = "".join(
            json.loads(data_of(event)[6:])["choices"][0]["delta"].get("content", "")
            for event in (had + rest)[:-1]
        )
        assert answer["choices"][0]["message"]["content"] == said
        await other.close()

    run(server, scenario)


def test_a_store_that_fails_stops_no_stream(tmp_path: Path) -> None:
    server = Server(tmp_path)
    path, body = CASES["chat"]
    (tmp_path / "r.sqlite3").mkdir()

    async def scenario() -> None:
        events = await server.begin(path, body)
        assert data_of(events[-1]) == "data: [DONE]"
        assert not any("id: " in event for event in events), "it can't be read on"

    run(server, scenario)


def test_places() -> None:
    assert read_place("7", "x").counts == (7,)
    for text in ("", "1.", ".1", "-1", "1e3", "x"):
        with pytest.raises(RequestError, match="no place"):
            read_place(text, "x")
