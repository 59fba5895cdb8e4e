"""`FileStore` in a folder and in an object store; lines of large files."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import threading
import tracemalloc
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.http.batches.lines import Source, check_lines, raw_lines
from deploy.http.files import file_store
from deploy.http.files.file_store import FileStore, check_file_store, new_id
from deploy.http.records.opening import open_files
from deploy.start.config import AppConfig
from engine.errors import ConfigError, RequestError

BATCH = new_id("batch_")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())


@pytest.fixture(params=["folder", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "files") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


async def add(store: FileStore, content: bytes, owner: str = "", **fields: Any) -> Any:
    given = {"filename": "f", "purpose": "batch", **fields}
    return await store.add(owner, io.BytesIO(content), **given)


def test_files(url: str) -> None:
    async def scenario() -> None:
        store = FileStore(url, 3600, 10**6)
        one, two = await add(store, b"one\n"), await add(store, b"two", purpose="evals")
        other = await add(store, b"three", owner="b")
        assert one.bytes == 4 and one.expires_at - one.created_at == 3600
        with await store.open(one.id, "") as file:
            assert file.read() == b"one\n"
        page = await store.page("", after=None, limit=9, newest_first=True, purpose=None)
        assert page == [two, one]
        page = await store.page("", after=one.id, limit=1, newest_first=False, purpose=None)
        assert page == [two]
        page = await store.page("", after=None, limit=1, newest_first=False, purpose=None)
        assert page == [one]
        page = await store.page("", after=None, limit=9, newest_first=False, purpose="evals")
        assert page == [two]
        for name in (other.id, "file-" + "0" * 32, "", "..", f"{one.id}.json", BATCH):
            with pytest.raises(RequestError) as error:
                await store.get(name, "")
            assert error.value.status == 404
        assert await add(store, b"again", file_id=one.id) == one  # whoever made it first
        await store.delete(one.id, "")
        with pytest.raises(RequestError):
            await store.delete(one.id, "")
        assert (await FileStore(url, 3600, 10**6).get(other.id, "b")) == other

    run(scenario)


def test_parts(url: str) -> None:
    async def scenario() -> None:
        store = FileStore(url, 3600, 10**6)
        read: list[bytes] = []
        await store.read_parts(BATCH, "", lambda part: read.append(part.read()))
        for number in range(12):
            await store.add_part(BATCH, "", b"%d" % number)
        await store.add_part(BATCH, "b", b"of another key")
        await store.read_parts(BATCH, "", lambda part: read.append(part.read()))
        assert read == [b"%d" % number for number in range(12)]
        await store.remove_parts(BATCH, "")
        await store.remove_parts(BATCH, "")
        await store.read_parts(BATCH, "", lambda _: pytest.fail("it was removed"))

    run(scenario)


def test_what_expired_is_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = FileStore(url, 3600, 10**6)
        short, long = await add(store, b"1", age_s=10), await add(store, b"2")
        await store.add_part(BATCH, "", b"part")
        fs, _ = store._place()
        orphan = f"{store._folder('')}/{new_id('file-')}"
        fs.pipe_file(orphan, b"never finished")
        await store.remove_expired()
        assert fs.exists(orphan)
        fs.pipe_file(f"{store._folder('')}/{new_id('file-')}.json", b"nonsense")  # others expire
        now = file_store.time.time()
        monkeypatch.setattr(file_store.time, "time", lambda: now + 60)
        with pytest.raises(RequestError):
            await store.get(short.id, "")
        await store.remove_expired()
        names = {Path(name).name for name in fs.ls(store._folder(""), detail=False)}
        names = {name for name in names if (Path(store._folder("")) / name).suffix != ".json"}
        assert names == {long.id, f"{BATCH}.parts", Path(orphan).name}
        monkeypatch.setattr(file_store.time, "time", lambda: now + 100 * 24 * 3600)
        await store.remove_expired()
        left = fs.ls(store._folder(""), detail=False)
        assert [fs.cat_file(path) for path in left] == [b"nonsense"]

    run(scenario)


def test_what_else_is_in_the_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume may have a `lost+found` that nobody may read."""

    async def scenario() -> None:
        store = FileStore(str(tmp_path), 3600, 10**6)
        file = await add(store, b"1")
        (tmp_path / "lost+found").symlink_to("nowhere")  # not even root reads it
        now = file_store.time.time()
        monkeypatch.setattr(file_store.time, "time", lambda: now + 3601)
        await store.remove_expired()
        assert list(tmp_path.rglob(f"{file.id}*")) == []
        assert (tmp_path / "lost+found").is_symlink()

    run(scenario)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0

    def failed() -> None:
        nonlocal failures
        failures += 1

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        store = FileStore(str(tmp_path), 3600, 10**6, failed)
        kept = await add(store, b"kept")
        monkeypatch.setattr(file_store.os, "fsync", full)
        with pytest.raises(RequestError) as error:
            await add(store, b"lost")
        assert error.value.status == 503 and failures == 1
        monkeypatch.undo()
        page = await store.page("", after=None, limit=9, newest_first=True, purpose=None)
        assert page == [kept]
        assert not list(tmp_path.rglob("*.new"))

    run(scenario)


def test_an_upload_that_breaks_off_leaves_nothing(url: str) -> None:
    async def scenario() -> None:
        store = FileStore(url, 3600, 100)
        with pytest.raises(RequestError) as error:
            await add(store, b"x" * 101)
        assert error.value.status == 413 and await store.room("") == 100
        fs, _ = store._place()
        folder = store._folder("")
        assert not fs.exists(folder) or not fs.ls(folder, detail=False)

    run(scenario)


def test_slow_files_hold_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store, waits = FileStore(str(tmp_path), 3600, 100), threading.Event()
        monkeypatch.setattr(store, "_described", lambda *_: waits.wait())
        asked = [asyncio.create_task(store.get("x", "")) for _ in range(50)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: 1) == 1  # of the threads that all share
        waits.set()
        await asyncio.gather(*asked)

    run(scenario)


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    run(lambda: add(FileStore(str(tmp_path / "files"), 3600, 10**6), b"secret"))
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0


def test_places_that_are_none() -> None:
    check_file_store("/some/folder")
    for wrong in ("nothing://x", "s3://bucket/x"):
        with pytest.raises(ConfigError, match="file_store"):
            check_file_store(wrong)


def test_none_is_no_folder() -> None:
    app = AppConfig.from_args({"model": "models/manta-small", "file_store": "none"})
    assert open_files(app.server) is None


def test_memory_does_not_grow_with_the_file() -> None:
    """Per line a hash is kept; a long line is never read whole."""

    class Lines(io.RawIOBase):
        def __init__(self, count: int) -> None:
            self._count, self._number, self._rest = count, 0, b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if not self._rest and self._number < self._count:
                line = {"custom_id": f"{self._number}", "url": "/v1/x", "body": {"a": "b" * 200}}
                self._rest = json.dumps(line).encode() + b"\n"
                self._number += 1
            size = min(len(buffer), len(self._rest))
            buffer[:size], self._rest = self._rest[:size], self._rest[size:]
            return size

    def peak(count: int) -> int:
        tracemalloc.start()
        source = Source(lambda: io.BufferedReader(Lines(count)), 4096, ("/v1/x",))
        checked = asyncio.run(check_lines(source))
        assert checked.num_requests == count and not checked.problems
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)
    few, many = peak(1000), peak(30_000)
    assert many - few < 30_000 * 50  # the file has 8 MB

    class Endless(io.RawIOBase):
        left = 64 << 20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            size = min(len(buffer), self.left)
            buffer[:size] = b"x" * size
            self.left -= size
            return size

    tracemalloc.start()
    ((number, line),) = raw_lines(io.BufferedReader(Endless()), 4096)
    assert (number, len(line)) == (1, 4097)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
