"""Files and batches: the official client, what is kept, and who goes on."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy.http.api import build_api
from deploy.http.batches import run as batch_run
from deploy.http.batches.output import BatchOutput, answered
from deploy.http.batches.routes import Batch, BatchList
from deploy.http.files.file_store import FileStore, new_id
from deploy.http.files.routes import FileList, FileObject
from deploy.http.records import runner, sqlite_store
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from engine.errors import RequestError
from tests.support.api_keys import entry, write_keys
from tests.support.fake_client import FakeEngineClient
from tests.support.kept_server import OneProcess

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "LEASE_S", 0.4)
    monkeypatch.setattr(runner, "PERIOD_S", 0.05)
    monkeypatch.setattr(runner, "RETRY_S", 0.1)
    monkeypatch.setattr(batch_run, "FLUSH_S", 0.05)
    monkeypatch.setattr(batch_run, "RETRY_S", 0.05)


class Server(OneProcess):
    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, "http://test/v1", **options)
        self.openai = openai.AsyncOpenAI(
            api_key="x", base_url="http://test/v1", http_client=self.http, max_retries=0
        )

    async def upload(self, data: bytes, **fields: Any) -> Any:
        return await self.openai.files.create(
            file=("in.jsonl", io.BytesIO(data)), purpose="batch", **fields
        )

    async def begin(self, data: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
        file = await self.upload(data)
        window = fields.pop("completion_window", "24h")
        return await self.openai.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields
        )

    async def end_of(self, batch: Any) -> Any:
        async with asyncio.timeout(20):
            while True:
                raw = (await self.http.get(f"/batches/{batch.id}")).json()
                Batch.model_validate(raw)
                if raw["status"] in ("completed", "failed", "expired", "cancelled"):
                    return await self.openai.batches.retrieve(batch.id)
                await asyncio.sleep(0.02)

    async def lines_of(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        content = await self.openai.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": name}], "max_tokens": 5, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": given}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_the_official_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            data = jsonl(*[line(f"q{i}") for i in range(5)], line("bad", max_tokens=-1))
            file = await server.upload(data)
            FileObject.model_validate((await server.http.get(f"/files/{file.id}")).json())
            assert file.bytes == len(data) and file.filename == "in.jsonl"
            assert (await server.openai.files.content(file.id)).read() == data
            assert [f.id async for f in server.openai.files.list()] == [file.id]
            batch = await server.openai.batches.create(
                input_file_id=file.id,
                endpoint=CHAT,
                completion_window="24h",
                metadata={"name": "first"},
            )
            assert batch.status == "validating" and batch.metadata == {"name": "first"}
            end = await server.end_of(batch)
            assert end.status == "completed", end
            counts = end.request_counts
            assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
            made = await server.lines_of(end.output_file_id)
            assert [one["custom_id"] for one in made] == [f"q{i}" for i in range(5)]
            assert all(one["response"]["status_code"] == 200 for one in made)
            assert all(one["error"] is None for one in made)
            body = made[0]["response"]["body"]
            assert body["object"] == "chat.completion"
            assert body["usage"]["completion_tokens"] == 5
            wrong = await server.lines_of(end.error_file_id)
            assert [one["custom_id"] for one in wrong] == ["bad"]
            assert wrong[0]["response"]["status_code"] == 400
            assert wrong[0]["response"]["body"]["error"]["param"] == "max_tokens"
            assert end.usage is not None and end.usage.output_tokens == 25
            listed = await server.openai.batches.list(limit=1)
            assert [b.id for b in listed.data] == [batch.id] and not listed.has_more
            BatchList.model_validate((await server.http.get("/batches")).json())
            FileList.model_validate((await server.http.get("/files")).json())
            deleted = await server.openai.files.delete(file.id)
            assert deleted.deleted
            with pytest.raises(openai.NotFoundError):
                await server.openai.files.retrieve(file.id)

    run(scenario)


def test_the_output_is_a_function_of_the_file(tmp_path: Path) -> None:
    """However it is interrupted: ids, times and what is drawn at random."""
    data = jsonl(*[line(f"q{i}", temperature=1.0, n=1 + i % 2) for i in range(150)])

    async def once(path: Path, losses: int, file_id: str | None) -> tuple[str, bytes]:
        server = Server(path)
        await server.__aenter__()
        server.client.step_s = 0.005
        server.client.num_cached = losses
        if file_id is None:
            file_id = (await server.upload(data)).id
        batch = await server.openai.batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h"
        )
        for _ in range(losses):
            parts = path / "files"
            async with asyncio.timeout(20):  # until something was kept
                before = len(list(parts.rglob("*.parts/*")))
                while len(list(parts.rglob("*.parts/*"))) == before:
                    if (await server.openai.batches.retrieve(batch.id)).status == "completed":
                        break
                    await asyncio.sleep(0.005)
            await server.lose()
            server = Server(path)
            await server.__aenter__()
            server.client.step_s = 0.005
        end = await server.end_of(batch)
        assert end.status == "completed" and end.request_counts.completed == 150
        content = (await server.openai.files.content(end.output_file_id)).read()
        assert not list((path / "files").rglob("*.parts"))
        await server.__aexit__()
        return file_id, content

    async def scenario() -> None:
        file_id, undisturbed = await once(tmp_path, 0, None)
        _, disturbed = await once(tmp_path, 3, file_id)
        assert disturbed == undisturbed

    run(scenario)


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, "response"),
        ("/v1/embeddings", {"input": ["hi", "ho"]}, "list"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "stream": True},
            "chat.completion",
        ),
    ],
)
def test_each_endpoint(tmp_path: Path, url: str, body: dict[str, Any], kind: str) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            data = jsonl({"custom_id": "one", "method": "POST", "url": url, "body": body})
            end = await server.end_of(await server.begin(data, url))
            (made,) = await server.lines_of(end.output_file_id)
            assert made["response"]["body"]["object"] == kind
            assert end.usage.input_tokens > 0

    run(scenario)


def test_a_line_is_answered_at_once_and_not_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            body = {"input": "hi", "background": True, "store": True}
            url = "/v1/responses"
            data = jsonl({"custom_id": "one", "method": "POST", "url": url, "body": body})
            end = await server.end_of(await server.begin(data, url))
            (made,) = await server.lines_of(end.output_file_id)
            response = made["response"]["body"]
            assert response["status"] in ("completed", "incomplete")
            kept = await server.http.get(f"/responses/{response['id']}")
            assert kept.status_code == 404

    run(scenario)


TWICE = "duplicate_custom_id"
GOOD = json.dumps(line("good")).encode()


@pytest.mark.parametrize(
    ("data", "problems"),
    [
        (b"", [(None, "empty_file")]),
        (b"\n\r\n", [(None, "empty_file")]),
        (GOOD + b"\n{nonsense\n", [(2, "invalid_json_line")]),
        (GOOD + b"\n[1]\n", [(2, "invalid_request")]),
        (GOOD + b'\n{"custom_id": "\xff"}\n', [(2, "invalid_json_line")]),
        (
            GOOD + b"\n\n" + GOOD + b"\n" + GOOD,
            [(3, "duplicate_custom_id"), (4, "duplicate_custom_id")],
        ),
        (jsonl(line("a", url="/v1/completions")), [(1, "invalid_url")]),
        (jsonl({**line("a"), "method": "GET"}), [(1, "invalid_request")]),
        (jsonl({**line("a"), "custom_id": ""}), [(1, "invalid_custom_id")]),
        (jsonl({**line("a"), "custom_id": 5}), [(1, "invalid_request")]),
        (jsonl({**line("a"), "body": "text"}), [(1, "invalid_request")]),
        (jsonl({"custom_id": "a", "url": CHAT}), [(1, "invalid_request")]),
        (b'{"x": ' + b"[" * 4000 + b"\n", [(1, "invalid_json_line")]),
        (GOOD + b"\n" + jsonl(line("x" * 5000)), [(2, "line_too_long")]),
        (jsonl(line("a", model="fake"), line("b", model="other")), [(2, "mismatched_model")]),
    ],
)
def test_files_that_are_wrong(
    tmp_path: Path, data: bytes, problems: list[tuple[int | None, str]]
) -> None:
    async def scenario() -> None:
        async with Server(tmp_path, max_body_bytes=4096) as server:
            end = await server.end_of(await server.begin(data))
            assert end.status == "failed"
            found = [(problem.line, problem.code) for problem in end.errors.data]
            assert found == problems, end.errors
            assert all(problem.message.endswith(".") for problem in end.errors.data)

    run(scenario)


def test_files_that_editors_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            lines = [json.dumps(line(f"ü{i}"), ensure_ascii=False).encode() for i in range(3)]
            data = b"\xef\xbb\xbf" + b"\r\n".join([lines[0], b"", *lines[1:]])
            end = await server.end_of(await server.begin(data))
            made = await server.lines_of(end.output_file_id)
            assert [one["custom_id"] for one in made] == ["ü0", "ü1", "ü2"]

    run(scenario)


def test_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            server.client.hang_at = 2
            batch = await server.begin(jsonl(line("long"), line("short", max_tokens=1)))
            async with asyncio.timeout(20):
                while (await server.openai.batches.retrieve(batch.id)).request_counts.completed < 1:
                    await asyncio.sleep(0.02)
            told = await server.openai.batches.cancel(batch.id)
            assert told.status == "cancelling" and told.cancelling_at
            end = await server.end_of(batch)
            assert end.status == "cancelled" and end.cancelled_at and end.cancelling_at
            made = await server.lines_of(end.output_file_id)
            assert [one["custom_id"] for one in made] == ["short"]
            assert server.client.open == 0
            with pytest.raises(openai.BadRequestError):
                await server.openai.batches.cancel(batch.id)
            assert (await server.http.get(f"/batches/{batch.id}.cancelled")).status_code == 404

    run(scenario)


def test_its_time_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            server.client.hang_at = 2
            data = jsonl(line("long"), line("short", max_tokens=1))
            end = await server.end_of(await server.begin(data, completion_window="1s"))
            assert end.status == "expired" and end.expired_at
            assert (end.request_counts.completed, end.request_counts.failed) == (1, 1)
            (made,) = await server.lines_of(end.output_file_id)
            assert made["custom_id"] == "short"
            (late,) = await server.lines_of(end.error_file_id)
            assert late["custom_id"] == "long" and late["error"]["code"] == "batch_expired"

    run(scenario)


def test_each_key_has_its_own(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("a"), entry("b"))

    async def scenario() -> None:
        async with Server(tmp_path, api_keys_file=str(keys)) as server:
            of_a, of_b = (server.openai.with_options(api_key=n) for n in "ab")
            file = await of_a.files.create(file=("f", jsonl(line("x"))), purpose="batch")
            batch = await of_a.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            for ask in (
                lambda: of_b.files.retrieve(file.id),
                lambda: of_b.files.content(file.id),
                lambda: of_b.files.delete(file.id),
                lambda: of_b.batches.retrieve(batch.id),
                lambda: of_b.batches.cancel(batch.id),
                lambda: of_b.batches.create(
                    input_file_id=file.id, endpoint=CHAT, completion_window="24h"
                ),
                lambda: of_b.files.list(after=file.id),
                lambda: of_b.batches.list(after=batch.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await ask()
            assert not (await of_b.files.list()).data and not (await of_b.batches.list()).data
            assert [b.id for b in (await of_a.batches.list()).data] == [batch.id]

    run(scenario)


def test_another_model_waits(tmp_path: Path) -> None:
    """It is never gone on with by a model that it wasn't begun with."""

    async def scenario() -> None:
        async with Server(tmp_path) as server:
            object.__setattr__(server.client.model_info, "digest", "one")
            server.client.hang_at = 1
            batch = await server.begin(jsonl(line("one")))
            await asyncio.sleep(0.2)
            await server.lose()
        async with Server(tmp_path) as other:
            object.__setattr__(other.client.model_info, "digest", "another")
            await asyncio.sleep(1.0)  # longer than the lease
            found = await other.openai.batches.retrieve(batch.id)
            assert found.status == "in_progress" and found.errors.data[0].code == "other_model"
            assert not other.client.started
        async with Server(tmp_path) as again:
            object.__setattr__(again.client.model_info, "digest", "one")
            assert (await again.end_of(batch)).status == "completed"

    run(scenario)


def test_lines_are_asked_again_when_engines_are_busy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            batch = None
            for status in (408, 429, 503):
                server.client.error_at = (0, RequestError("not now", status=status))
                if batch is None:
                    batch = await server.begin(jsonl(*[line(f"q{i}") for i in range(3)]))
                await asyncio.sleep(0.2)
                assert (await server.openai.batches.retrieve(batch.id)).status == "in_progress"
            server.client.error_at = None
            end = await server.end_of(batch)
            assert end.status == "completed" and end.request_counts.completed == 3

    run(scenario)


ANCHOR = {"anchor": "created_at"}


def test_uploads_that_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path, max_file_bytes=100_000, file_store_max_bytes=2**20) as server:
            sent = 0

            async def endless() -> AsyncIterator[bytes]:
                nonlocal sent
                yield (
                    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
                    b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
                )
                while True:
                    sent += 2**16
                    yield b"x" * 2**16

            form = {"content-type": "multipart/form-data; boundary=b"}
            refused = await server.http.post("/files", content=endless(), headers=form)
            assert refused.status_code == 413 and sent < 1_000_000
            for content, headers, status in (
                (b"{}", {"content-type": "application/json"}, 415),
                (b"", {}, 415),
                (b"nonsense", form, 400),
                (b"", form, 400),
                (b"", {"content-type": "multipart/form-data"}, 415),
                (b"--b--\r\n", {**form, "sec-fetch-site": "cross-site"}, 403),
            ):
                reply = await server.http.post("/files", content=content, headers=headers)
                assert reply.status_code == status, (content, reply.text)
                assert reply.json()["error"]["message"]
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await server.openai.files.create(file=("x", b"1"), purpose="other")  # type: ignore[arg-type]
            for seconds in (5, 10**9):
                with pytest.raises(openai.BadRequestError, match="expires_after"):
                    await server.upload(
                        b"1", expires_after={"anchor": "created_at", "seconds": seconds}
                    )
            kept = await server.upload(
                b"1", expires_after={"anchor": "created_at", "seconds": 3600}
            )
            assert kept.expires_at - kept.created_at == 3600
            for _ in range(10):
                await server.upload(b"1" * 99_000)
            with pytest.raises(openai.APIStatusError) as full:
                await server.upload(b"1" * 99_000)
            assert full.value.status_code == 413 and "file_store_max_bytes" in full.value.message

    run(scenario)


def test_batches_that_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            file = await server.upload(jsonl(line("x", model="unknown")))
            other = await server.openai.files.create(file=("x", b"1"), purpose="user_data")
            good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
            for change, status, param in (
                ({}, 404, "model"),
                ({"input_file_id": "file-" + "0" * 32}, 404, "file_id"),
                ({"input_file_id": "../../etc/passwd"}, 404, "file_id"),
                ({"input_file_id": other.id}, 400, "input_file_id"),
                ({"endpoint": "/v1/none"}, 400, "endpoint"),
                ({"completion_window": "soon"}, 400, "completion_window"),
                ({"completion_window": "9999d"}, 400, "completion_window"),
                ({"metadata": {"k": "v" * 600}}, 400, "metadata"),
            ):
                reply = await server.http.post("/batches", json={**good, **change})
                assert reply.status_code == status, reply.text
                assert reply.json()["error"]["param"].startswith(param), reply.text
            for path in (
                "/files?limit=0",
                "/files?order=up",
                "/batches?limit=101",
                "/files?after=x",
            ):
                assert (await server.http.get(path)).status_code in (400, 404), path

    run(scenario)


def test_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            made = [(await server.begin(jsonl(line("x")))).id for _ in range(5)]
            files = [
                file.id
                async for file in server.openai.files.list(limit=2, order="asc", purpose="batch")
            ]
            assert len(files) == 5 and files == sorted(files)
            found = [batch.id async for batch in server.openai.batches.list(limit=2)]
            assert found == made[::-1]

    run(scenario)


@pytest.mark.parametrize("option", ["request_store", "file_store"])
def test_none_without_a_store(tmp_path: Path, option: str) -> None:
    async def scenario() -> None:
        given: dict[str, Any] = {"request_store_path": str(tmp_path / "r.sqlite3"), option: "none"}
        app = build_api(
            lambda: ServedModels(FakeEngineClient()),
            ApiSettings(ServerOptions(**given)),
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as http:
            form = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
            asked = [await http.get(path) for path in ("/v1/files", "/v1/batches")]
            asked += [await http.get("/v1/files/file-1"), await http.get("/v1/batches/batch_1")]
            asked += [await http.post("/v1/files", **form), await http.post("/v1/batches", json={})]
            for reply in asked:
                error = reply.json()["error"]
                assert reply.status_code == 400 and f"({option}: none)" in error["message"]

    run(scenario)


def test_a_batch_waits_where_there_are_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option was taken away, or this process is told of it before others are."""
    monkeypatch.setattr(runner, "NO_WORKER_S", 0.1)

    async def scenario() -> None:
        async with Server(tmp_path) as server:
            server.client.hang_at = 1
            batch = await server.begin(jsonl(line("one")))
            await asyncio.sleep(0.2)
            await server.lose()
        async with Server(tmp_path, file_store="none") as without:
            await asyncio.sleep(1.0)  # longer than the lease
            assert not without.client.started
            body = {"input": "hi", "background": True, "max_output_tokens": 3}
            made = (await without.http.post("/responses", json=body)).json()
            async with asyncio.timeout(20):  # the same process makes other answers
                while made["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(0.02)
                    made = (await without.http.get(f"/responses/{made['id']}")).json()
            assert made["status"] == "incomplete"
        async with Server(tmp_path) as again:
            assert (await again.end_of(batch)).status == "completed"

    run(scenario)


class _Dying:
    """Stops a process' writes, of records and of files, after so many."""

    def __init__(self, server: Server, last: int) -> None:
        self.count = 0
        self._last = last
        store, files = server.app.state.store, server.app.state.files
        self._restore = (store, store._run), (files, files._run)
        store._run = self._counted(store._run, ("write", "remove"))
        files._run = self._counted(files._run, ("write", "<lambda>", "remove"))

    def _counted(self, run: Any, names: tuple[str, ...]) -> Any:
        async def counted(work: Any) -> Any:
            if self.count >= self._last:
                await asyncio.Event().wait()  # the process is dead
            found = await run(work)
            self.count += work.__name__ in names
            return found

        return counted

    def end(self) -> None:
        for owner, run in self._restore:
            owner._run = run


def test_after_each_write(tmp_path: Path) -> None:
    """Whatever the process had written when it died, another one makes the same output."""
    data = jsonl(*[line(f"q{i}", temperature=1.0) for i in range(6)], line("bad", n=-1))

    async def begun(path: Path) -> tuple[Any, str]:
        async with Server(path) as server:
            return await server.upload(data)

    async def life(path: Path, file_id: str, last: int) -> tuple[int, Any]:
        """One process, until it has made so many writes or the batch has ended."""
        server = Server(path)
        await server.__aenter__()
        dying = _Dying(server, last)
        fields: Any = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        making = asyncio.create_task(server.openai.batches.create(**fields))
        runner_, store = server.app.state.runner, server.app.state.store
        async with asyncio.timeout(20):
            while dying.count < last and not (making.done() and not runner_._answers):
                await asyncio.sleep(0.01)
        batch = making.result() if making.done() else None
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        for task in [*runner_._answers, runner_._looking]:
            task.cancel()
        await asyncio.gather(*runner_._answers, runner_._looking, return_exceptions=True)
        dying.end()
        await store.close()
        await server.http.aclose()
        return dying.count, batch

    async def scenario() -> None:
        file = await begun(tmp_path)
        total, batch = await life(tmp_path, file.id, 10**6)
        async with Server(tmp_path) as server:
            end = await server.end_of(batch)
            want = [
                (await server.openai.files.content(name)).read()
                for name in (end.output_file_id, end.error_file_id)
            ]
            known = {batch.id}
        assert total >= 8
        for last in range(1, total):
            await life(tmp_path, file.id, last)
            await asyncio.sleep(0.4)  # its lease
            async with Server(tmp_path) as server:
                for batch in (await server.openai.batches.list(limit=1)).data:
                    end = await server.end_of(batch)
                    made = [
                        (await server.openai.files.content(name)).read()
                        for name in (end.output_file_id, end.error_file_id)
                    ]
                    assert made == want, last
                    assert end.request_counts.completed == 6 and end.request_counts.failed == 1
                    known.add(batch.id)
        assert len(known) > 8
        assert not list((tmp_path / "files").rglob("*.parts"))

    run(scenario)


def test_a_batch_whose_parts_are_gone_stays_as_it_ended(tmp_path: Path) -> None:
    """The process died behind the removal of the parts, before the record was ended."""

    async def scenario() -> None:
        at_the_end, ended = asyncio.Event(), asyncio.Event()

        async def never(*_: Any) -> None:
            at_the_end.set()
            await asyncio.Event().wait()

        async with Server(tmp_path) as first:
            first.app.state.store.end = never
            batch = await first.begin(jsonl(*[line(f"q{i}") for i in range(3)]))
            async with asyncio.timeout(20):
                await at_the_end.wait()
            assert not list((tmp_path / "files").rglob("*.parts"))
            await first.lose()

        async with Server(tmp_path) as second:
            store_end = second.app.state.store.end

            async def end_it(*given: Any) -> None:
                await store_end(*given)
                ended.set()

            second.app.state.store.end = end_it
            async with asyncio.timeout(20):
                await ended.wait()
            end = await second.end_of(batch)
            assert end.request_counts.completed == 3
            assert len(await second.lines_of(end.output_file_id)) == 3

    run(scenario)


def test_a_line_that_two_processes_answered_is_there_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        files, batch = FileStore(str(tmp_path), 3600, 10**6), new_id("batch_")
        outputs = [BatchOutput(files, batch, "") for _ in range(2)]
        for output, numbers in zip(outputs, ([3, 1], [1, 2, 3]), strict=True):
            for number in numbers:
                body = b'{"usage": {"prompt_tokens": 2, "completion_tokens": 3}}'
                output.add(answered(number, f"id-{number}", f"{number}", 200, "r", body))
            await output.flush()
        whole = BatchOutput(files, batch, "")
        await whole.load()
        assert (whole.completed, whole.failed, whole.tokens) == (3, 0, (6, 9))
        with closing(await whole.assemble()) as assembled:
            ids = [json.loads(line)["custom_id"] for line in assembled.lines(True)]
            assert ids == ["1", "2", "3"] and not list(assembled.lines(False))

    run(scenario)


def test_counts_are_those_of_the_files(tmp_path: Path) -> None:
    """A part of another process may come behind what this one has read, and goes before its own."""

    async def scenario() -> None:
        files, batch = FileStore(str(tmp_path), 3600, 10**6), new_id("batch_")
        late, mine = (BatchOutput(files, batch, "") for _ in range(2))
        await mine.load()
        late.add(answered(1, "id", "1", 500, "r", b"{}"))
        await late.flush()
        mine.add(answered(1, "id", "1", 200, "r", b"{}"))
        await mine.flush()
        assert (mine.completed, mine.failed) == (1, 0)
        with closing(await mine.assemble()) as whole:
            assert (whole.completed, whole.failed) == (0, 1)
            assert len(list(whole.lines(False))) == 1

    run(scenario)


def test_who_lost_its_lease_changes_no_output(tmp_path: Path) -> None:
    """A process that was stopped while it made the files wakes up behind their end."""

    async def scenario() -> None:
        async with Server(tmp_path) as slow:
            stops, wakes = asyncio.Event(), asyncio.Event()
            assemble = BatchOutput.assemble

            async def stopped(output: BatchOutput) -> Any:
                BatchOutput.assemble = assemble  # type: ignore[method-assign]
                stops.set()
                await wakes.wait()
                return await assemble(output)

            BatchOutput.assemble = stopped  # type: ignore[method-assign, assignment]
            batch = await slow.begin(jsonl(*[line(f"q{i}") for i in range(5)]))
            await stops.wait()
            looking = slow.app.state.runner._looking
            looking.cancel()  # it renews no lease
            (drive,) = slow.app.state.runner._answers
            async with Server(tmp_path) as other:
                end = await other.end_of(batch)
                content = (await other.openai.files.content(end.output_file_id)).read()
                wakes.set()
                await asyncio.wait([drive])
                after = await other.openai.batches.retrieve(batch.id)
                assert after == end and after.request_counts.completed == 5
                assert (await other.openai.files.content(end.output_file_id)).read() == content

    run(scenario)


def test_a_batch_whose_end_cant_be_kept_is_taken_up_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            files, away = server.app.state.files, True
            get, read = files.get, files.read_parts

            async def lost(*_: Any) -> Any:
                raise RequestError("No such File", status=404, code="file_not_found")

            async def parts(*args: Any) -> Any:
                if away:
                    raise OSError("no space left")
                return await read(*args)

            file = await server.upload(jsonl(line("x")))
            files.read_parts = parts
            batch = await server.openai.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            files.get = lost
            await asyncio.sleep(0.5)
            assert not server.app.state.store._held or server.app.state.runner._answers
            away, files.get = False, lost
            end = await server.end_of(batch)
            assert end.status in ("failed", "completed")
            files.get = get

    run(scenario)


def test_a_key_that_is_removed_ends_its_batches(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("a"), entry("b"))

    async def scenario() -> None:
        async with Server(tmp_path, api_keys_file=keys) as server:
            of_a = server.openai.with_options(api_key="a")
            server.client.hang_at = 1
            file = await of_a.files.create(file=("f", jsonl(line("x"))), purpose="batch")
            batch = await of_a.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            async with asyncio.timeout(20):
                while not server.client.started:
                    await asyncio.sleep(0.01)
                write_keys(tmp_path / "keys.yaml", entry("b"))
                while server.client.open:
                    await asyncio.sleep(0.05)
            write_keys(tmp_path / "keys.yaml", entry("a"))
            async with asyncio.timeout(20):
                while True:
                    await asyncio.sleep(0.1)
                    try:
                        found = await of_a.batches.retrieve(batch.id)
                    except openai.AuthenticationError:  # the file isn't read yet
                        continue
                    break
            assert found.status == "failed" and "key" in found.errors.data[0].message

    run(scenario)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_batch_that_waits_for_its_model_can_end(tmp_path: Path, is_cancelled: bool) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            object.__setattr__(server.client.model_info, "digest", "one")
            server.client.hang_at = 1
            batch = await server.begin(jsonl(line("one")), completion_window="2s")
            async with asyncio.timeout(20):
                while not server.client.started:
                    await asyncio.sleep(0.01)
            await server.lose()
        async with Server(tmp_path) as other:
            object.__setattr__(other.client.model_info, "digest", "another")
            if is_cancelled:
                told = await other.openai.batches.cancel(batch.id)
                assert told.cancelling_at
            end = await other.end_of(batch)
            assert end.status == ("cancelled" if is_cancelled else "expired")
            assert bool(end.error_file_id) is not is_cancelled
            assert not other.client.started

    run(scenario)


def test_odd_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Server(tmp_path) as server:
            data = jsonl({**line("x"), "number": "x"})  # a field that nobody knows
            batch = await server.begin(data)
            assert (await server.end_of(batch)).status == "completed"
            cross = {"sec-fetch-site": "cross-site"}
            path = f"/batches/{batch.id}/cancel"
            assert (await server.http.post(path, headers=cross)).status_code == 403
            body = {"input": "hi", "previous_response_id": batch.id}
            assert (await server.http.post("/responses", json=body)).status_code == 404
            for charset, status in (("utf-7", 415), ("unicode_escape", 415), ("utf-8", 400)):
                form = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
                reply = await server.http.post("/files", content=b"--b--\r\n", headers=form)
                assert reply.status_code == status, charset

    run(scenario)
