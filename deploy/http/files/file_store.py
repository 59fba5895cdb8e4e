"""`FileStore`: the files of `/v1/files`, in a folder or an object store. `StoredFile`: one of them.

fsspec reaches them, so that `file_store` may be a path or a URL as `s3://bucket/manta`. A file is
its content beside a description in JSON, which is written last and removed first: what has no
description isn't there. Each API key has a folder of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from deploy.http.body import encode_json
from engine.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
BLOCK = 1 << 20
"""Bytes that are read and written at a time."""
PARTS_AGE_S = 60 * 24 * 3600
"""No batch is older that has parts of its output."""
ORPHAN_AGE_S = 24 * 3600
"""A content that nobody has written to for so long, and has no description, was never finished."""
THREADS = 8
"""That wait for files, so that slow ones hold up nothing else."""
_OWNER = re.compile(r"[0-9a-f]{32}")
"""The folder of an API key."""
_ID = re.compile(r"(file|batch)[-_]([0-9a-f]{14})[0-9a-f]{18}")


class StoredFile(msgspec.Struct, kw_only=True):
    """A file, as `POST /v1/files` took it or a batch made it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    digest: str
    """SHA-256 of the content."""

    def shown(self) -> dict[str, Any]:
        """As the API shows it."""
        fields = msgspec.structs.asdict(self)
        del fields["digest"]
        return {"object": "file", "status": "processed", **fields}


def new_id(prefix: str, of: str | None = None, at: float | None = None) -> str:
    """An id that sorts by the time of its making, `at` (None: now). `of`: what else it follows
    from; None: it is drawn."""
    us = time.time_ns() // 1000 if at is None else int(at * 1e6)
    drawn = secrets.token_hex(9) if of is None else hashlib.sha256(of.encode()).hexdigest()[:18]
    return f"{prefix}{us:014x}{drawn}"


class FileStore:
    """Its methods raise `RequestError`: 404 for a file that isn't there or is another key's, 413 if
    too much is stored, 503 if the files can't be reached."""

    def __init__(
        self,
        url: str | Callable[[], Path],
        max_age_s: float,
        max_bytes: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`url`: where the files are, or what says it where they are first needed. `max_bytes`: of
        one key. `on_failure` is called whenever they can't be reached."""
        self._url = url
        self.max_age_s, self.max_bytes = max_age_s, max_bytes
        self._on_failure = on_failure
        self._opened: tuple[Any, str] | None = None
        self._threads: ThreadPoolExecutor | None = None

    async def room(self, owner: str) -> int:
        """Bytes that a key's next file may have."""
        return await self._run(lambda: self._room(owner))

    async def add(
        self,
        owner: str,
        content: IO[bytes] | Iterable[bytes],
        *,
        filename: str,
        purpose: str,
        age_s: float | None = None,
        file_id: str | None = None,
    ) -> StoredFile:
        """Keep a file for `age_s`. If there is one of the id `file_id`, it is that one."""

        def write() -> StoredFile:
            name = file_id or new_id("file-")
            path, digest = self._path(owner, name), hashlib.sha256()
            room: float = math.inf
            if file_id is None:
                room = self._room(owner)
            else:
                try:
                    return self._described(file_id, owner)
                except RequestError as error:
                    if error.status != 404:
                        raise

            def blocks() -> Iterator[bytes]:
                size = 0
                for block in _blocks(content):
                    size += len(block)
                    if size > room:
                        raise too_much(self.max_bytes)
                    digest.update(block)
                    yield block

            size = self._write(path, blocks())
            now = time.time()
            file = StoredFile(
                id=name,
                bytes=size,
                created_at=int(now),
                filename=filename,
                purpose=purpose,
                expires_at=int(now + min(age_s or self.max_age_s, self.max_age_s)),
                digest=digest.hexdigest(),
            )
            self._write(f"{path}.json", [encode_json(file)])
            return file

        return await self._run(write)

    async def get(self, file_id: str, owner: str) -> StoredFile:
        """What is said of a file."""
        return await self._run(lambda: self._described(file_id, owner))

    async def open(self, file_id: str, owner: str) -> IO[bytes]:
        """Its content, to be read and closed in threads."""
        return await self.in_thread(self.open_now, file_id, owner)

    def open_now(self, file_id: str, owner: str) -> IO[bytes]:
        """As `open`, in a thread."""

        def look() -> IO[bytes]:
            self._described(file_id, owner)
            return self._open(self._path(owner, file_id))

        return self._do(look)

    async def page(
        self, owner: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> list[StoredFile]:
        """Files behind `after` in the order of their making."""

        def look() -> list[StoredFile]:
            names = sorted((name for name, _ in self._listed(owner)), reverse=newest_first)
            if after is not None:
                if after not in names:
                    raise no_file(after, "after")
                names = names[names.index(after) + 1 :]
            found: list[StoredFile] = []
            for name in names:
                try:
                    file = self._described(name, owner)
                except RequestError as error:  # deleted or expired meanwhile
                    if error.status != 404:
                        raise
                    continue
                if purpose in (None, file.purpose):
                    found.append(file)
                if len(found) == limit:
                    break
            return found

        return await self._run(look)

    async def delete(self, file_id: str, owner: str) -> None:
        """Forget a file."""

        def remove() -> None:
            self._described(file_id, owner)
            self._remove(owner, file_id)

        await self._run(remove)

    async def add_part(self, batch_id: str, owner: str, data: bytes) -> None:
        """Keep a part of a batch's output, for good when this returns."""
        name = f"{time.time_ns():019d}-{secrets.token_hex(4)}"
        path = f"{self._parts(batch_id, owner)}/{name}"
        await self._run(lambda: self._write(path, [data]))

    async def read_parts(
        self, batch_id: str, owner: str, read: Callable[[IO[bytes]], None]
    ) -> None:
        """Have every part read, in a thread, in the order of their making."""

        def each() -> None:
            fs, _ = self._place()
            folder = self._parts(batch_id, owner)
            fs.invalidate_cache()
            names = fs.ls(folder, detail=False) if fs.exists(folder) else []
            for name in sorted(names):
                if "." not in Path(name).name:  # else it isn't complete
                    with self._open(name) as part:
                        read(part)

        await self._run(each)

    async def remove_parts(self, batch_id: str, owner: str) -> None:
        """They are needed no longer."""

        def remove() -> None:
            fs, _ = self._place()
            folder = self._parts(batch_id, owner)
            if fs.exists(folder):
                fs.rm(folder, recursive=True)

        await self._run(remove)

    async def remove_expired(self) -> None:
        """Remove files whose time is over, of all keys, and what was never finished."""
        if not self._opened and callable(self._url) and not self._url().exists():
            return  # there never was a file
        await self._run(self._sweep)

    def _sweep(self) -> None:
        fs, root = self._place()
        fs.invalidate_cache()
        for folder in fs.ls(root, detail=False):
            if not _OWNER.fullmatch(Path(folder).name):  # not ours, as a disk's `lost+found`
                continue
            names = {Path(path).name for path in fs.ls(folder, detail=False)}
            for name in names:
                try:
                    self._sweep_one(fs, f"{folder}/{name}", names)
                except (OSError, ValueError, KeyError) as error:  # others must not stay for it
                    logger.error("%s/%s is left where it is: %s", folder, name, error)

    def _sweep_one(self, fs: Any, path: str, names: set[str]) -> None:
        """Remove what is at a path, if its time is over. `names`: all in its folder."""
        now, name = time.time(), Path(path).name
        found = _ID.match(name)
        if found is None:
            return
        if name.endswith(".parts"):
            if now - int(found[2], 16) / 1e6 > PARTS_AGE_S:
                fs.rm(path, recursive=True)
        elif name.endswith(".json"):
            if json.loads(fs.cat_file(path))["expires_at"] <= now:
                fs.rm_file(path)
                fs.rm_file(path.removesuffix(".json"))
        elif name == found[0] and f"{name}.json" in names:
            return
        elif now - fs.modified(path).timestamp() > ORPHAN_AGE_S:
            fs.rm_file(path)

    def _described(self, file_id: str, owner: str) -> StoredFile:
        found = _ID.fullmatch(file_id)
        if found is None or found[1] != "file":
            raise no_file(file_id)
        fs, _ = self._place()
        try:
            data = fs.cat_file(f"{self._path(owner, file_id)}.json")
        except FileNotFoundError:
            raise no_file(file_id) from None
        file = msgspec.json.decode(data, type=StoredFile)
        if file.expires_at <= time.time():
            raise no_file(file_id)
        return file

    def _remove(self, owner: str, file_id: str) -> None:
        fs, _ = self._place()
        path = self._path(owner, file_id)
        fs.rm_file(f"{path}.json")
        fs.rm_file(path)

    def _room(self, owner: str) -> int:
        return max(self.max_bytes - sum(size for _, size in self._listed(owner)), 0)

    def _listed(self, owner: str) -> list[tuple[str, int]]:
        """Ids and sizes of a key's contents that have a description."""
        fs, _ = self._place()
        folder = self._folder(owner)
        fs.invalidate_cache()
        if not fs.exists(folder):
            return []
        sizes = {Path(f["name"]).name: int(f["size"] or 0) for f in fs.ls(folder, detail=True)}
        return [(name, size) for name, size in sizes.items() if f"{name}.json" in sizes]

    def _write(self, path: str, blocks: Iterable[bytes]) -> int:
        """Write a file whole or not at all; returns its bytes. It survives the loss of power."""
        fs, _ = self._place()
        if isinstance(fs, LocalFileSystem):
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            return write_whole(path, blocks)
        with tempfile.NamedTemporaryFile() as whole:  # an object store keeps what breaks off
            size = sum(map(whole.write, blocks))
            whole.flush()
            fs.put_file(whole.name, path)
        return size

    def _open(self, path: str) -> IO[bytes]:
        fs, _ = self._place()
        return io.BufferedReader(fs.open(path, "rb"), BLOCK)

    def _path(self, owner: str, name: str) -> str:
        return f"{self._folder(owner)}/{name}"

    def _parts(self, batch_id: str, owner: str) -> str:
        return self._path(owner, f"{batch_id}.parts")

    def _folder(self, owner: str) -> str:
        _, root = self._place()
        return f"{root}/{hashlib.sha256(owner.encode()).hexdigest()[:32]}"

    def _place(self) -> tuple[Any, str]:
        """The file system, and where the files are in it."""
        if self._opened is None:
            url = self._url if isinstance(self._url, str) else str(self._url())
            fs, root = fsspec.core.url_to_fs(url)
            if isinstance(fs, LocalFileSystem):
                os.makedirs(root, 0o700, exist_ok=True)
            self._opened = fs, root.rstrip("/")
        return self._opened

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """What `work` returns, in one of the threads that wait for files."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "manta-files")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self.in_thread(self._do, work)

    def _do(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except RequestError:
            raise
        except FileNotFoundError as error:  # deleted while it was looked at
            raise no_file(Path(str(error.filename or "")).name) from error
        except Exception as error:  # whatever a file system raises
            logger.error("files can't be kept: %s: %s", type(error).__name__, error)
            self._on_failure()
            raise RequestError(
                "Files can't be stored at present.", status=503, code="file_store_unavailable"
            ) from error


def write_whole(path: str, blocks: Iterable[bytes]) -> int:
    """Write a local file whole or not at all; returns its bytes. It survives the loss of power."""
    draft = f"{path}.{secrets.token_hex(4)}.new"
    try:
        with open(draft, "wb") as file:
            size = sum(map(file.write, blocks))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.remove(draft)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size


def too_much(limit: int) -> RequestError:
    """The error for a file that a key has no room for."""
    message = f"Files of a key may have {limit} bytes in all (file_store_max_bytes); delete some."
    return RequestError(message, "file", status=413)


def check_file_store(url: str) -> None:
    """Raise `ConfigError` unless this is a folder or a URL whose file system is installed."""
    try:
        fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"file_store is no place for files: {error}.") from None


def _blocks(content: IO[bytes] | Iterable[bytes]) -> Iterable[bytes]:
    if hasattr(content, "read"):
        return iter(lambda: content.read(BLOCK), b"")
    return content


def no_file(file_id: str, field: str = "file_id") -> RequestError:
    """Nobody learns whether a file is another key's."""
    message = f"No such File object: {file_id[:100]}"
    return RequestError(message, field, status=404, code="file_not_found")
