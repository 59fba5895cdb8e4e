"""`SqliteStore`: records in one file, which the ingresses of a machine share.

SQLite's write-ahead log lets one process write while others read. Each process has one connection,
in a thread of its own, opened with the first record.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from platformdirs.unix import Unix

from deploy.http.records.store import MAX_CHAIN, RecordStore, ResponseRecord, no_record
from deploy.options import ServerOptions
from engine.errors import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
BUSY_TIMEOUT_S = 5.0
"""How long another process may write."""
CLEAN_INTERVAL_S = 60.0
WAL_BYTES = 4 << 20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
"""
_decode = msgspec.msgpack.Decoder(ResponseRecord).decode


def default_path() -> Path:
    """In `$MANTA_STATE_DIR`, or in `manta` in the user's folder for state (XDG)."""
    named = os.environ.get("MANTA_STATE_DIR")
    return (Path(named) if named else Unix("manta").user_state_path) / "records.sqlite3"


def open_store(server: ServerOptions) -> RecordStore | None:
    """The store that a server's options ask for."""
    if server.request_store == "none":
        return None
    path = Path(server.request_store_path) if server.request_store_path else None
    return SqliteStore(path, server.request_store_max_age_s, server.request_store_max_bytes)


class SqliteStore(RecordStore):
    """Opened when it is used first, so that an application that has it can be shipped."""

    def __init__(self, path: Path | None, max_age_s: float, max_bytes: int) -> None:
        """`path`: None for `default_path` of the process. Records older than `max_age_s` are
        removed, and the oldest while the file's content is larger than `max_bytes`."""
        self._path: Path | None = path
        self._max_age_s, self._max_bytes = max_age_s, max_bytes
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._next_clean = 0.0

    async def put(self, record: ResponseRecord) -> None:
        row = record.owner, record.id, time.time(), msgspec.msgpack.encode(record)

        def write(connection: sqlite3.Connection) -> None:
            if time.monotonic() >= self._next_clean:
                self._next_clean = time.monotonic() + CLEAN_INTERVAL_S
                self._remove_old(connection)
            connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", row)
            self._remove_surplus(connection)

        await self._run(write)

    async def get(self, record_id: str, owner: str) -> ResponseRecord:
        return await self._run(lambda connection: self._find(connection, record_id, owner))

    async def delete(self, record_id: str, owner: str) -> None:
        def remove(connection: sqlite3.Connection) -> None:
            found = connection.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (record_id, owner)
            )
            if found.rowcount == 0:
                raise no_record(record_id)

        await self._run(remove)

    async def conversation(self, record_id: str, owner: str) -> list[ResponseRecord]:
        def read(connection: sqlite3.Connection) -> list[ResponseRecord]:
            found: list[ResponseRecord] = []
            wanted: str | None = record_id
            while wanted is not None:
                if len(found) == MAX_CHAIN:
                    raise RequestError(
                        f"The conversation has more than {MAX_CHAIN} responses.",
                        "previous_response_id",
                    )
                found.append(self._find(connection, wanted, owner, "previous_response_id"))
                wanted = found[-1].previous
            return found[::-1]

        return await self._run(read)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        connection, self._connection = self._connection, None
        if thread is not None and connection is not None:
            await asyncio.get_running_loop().run_in_executor(thread, connection.close)
        if thread is not None:
            thread.shutdown()

    def _find(
        self, connection: sqlite3.Connection, record_id: str, owner: str, field: str = "response_id"
    ) -> ResponseRecord:
        row = connection.execute(
            "SELECT record FROM responses WHERE id = ? AND owner = ? AND created > ?",
            (record_id, owner, time.time() - self._max_age_s),
        ).fetchone()
        if row is None:
            raise no_record(record_id, field)
        return _decode(row[0])

    def _remove_old(self, connection: sqlite3.Connection) -> None:
        oldest = time.time() - self._max_age_s
        connection.execute("DELETE FROM responses WHERE created <= ?", (oldest,))

    def _remove_surplus(self, connection: sqlite3.Connection) -> None:
        """The oldest tenth at a time."""
        while _used_bytes(connection) > self._max_bytes:
            (count,) = connection.execute("SELECT COUNT(*) FROM responses").fetchone()
            connection.execute(
                "DELETE FROM responses WHERE rowid IN "
                "(SELECT rowid FROM responses ORDER BY created LIMIT ?)",
                (max(count // 10, 1),),
            )
            if count <= 1:
                return

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in the store's thread, as one transaction."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "manta-records")

        def run() -> T:
            try:
                if self._connection is None:
                    self._connection = self._open()
                with self._connection as connection:
                    return work(connection)
            except (sqlite3.Error, OSError) as error:
                logger.error("records can't be kept in %s: %s", self._path, error)
                raise RequestError(
                    "Responses can't be stored at present; ask with store: false.",
                    status=503,
                    code="store_unavailable",
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _open(self) -> sqlite3.Connection:
        self._path = path = self._path or default_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # also for its -wal and -shm
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.executescript(_SCHEMA)
        return connection


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Of the file's content; what was removed is used again."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
