"""`SqliteStore`: records in one file, which the ingresses of a machine share.

SQLite's write-ahead log lets one process write while others read. Each process has one connection,
in a thread of its own, opened with the first record.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from platformdirs.unix import Unix

from deploy.http.body import encode_json
from deploy.http.records.store import (
    LEASE_S,
    Head,
    Record,
    RecordStore,
    encoded,
    no_record,
)

T = TypeVar("T")
_Row = tuple[str, str, str | None, int, bytes, bytes, bytes | None]
BUSY_TIMEOUT_S = 5.0
"""How long another process may write."""
CLEAN_INTERVAL_S = 60.0
WAL_BYTES = 4 << 20
_ENDPOINT = "json_extract(CAST(head AS TEXT), '$[0]')"
"""Of a record's head."""
_SCHEMA = f"""
DROP TABLE IF EXISTS responses;
CREATE TABLE IF NOT EXISTS records (
    owner TEXT NOT NULL, id TEXT NOT NULL, written REAL NOT NULL, expires REAL NOT NULL,
    lease REAL, holder TEXT, digest TEXT NOT NULL, ended INTEGER NOT NULL, previous TEXT,
    head BLOB NOT NULL, body BLOB NOT NULL, response BLOB, PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS by_expiry ON records (expires);
CREATE INDEX IF NOT EXISTS by_lease ON records (lease) WHERE lease IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_endpoint ON records (owner, {_ENDPOINT}) WHERE response IS NOT NULL;
CREATE TABLE IF NOT EXISTS tokens (record INTEGER NOT NULL, pieces BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_record ON tokens (record);
CREATE TRIGGER IF NOT EXISTS without_record AFTER DELETE ON records
    BEGIN DELETE FROM tokens WHERE record = old.rowid; END;
"""
_FIELDS = "id, owner, previous, ended, head, body, response"
_decode = msgspec.json.Decoder().decode


def state_path(name: str, keys_file: str | None = None) -> Path:
    """In `$MANTA_STATE_DIR`, or in `manta` in the user's folder for state (XDG). `name`: what is
    kept there, "records" in a file and others in a folder. Servers with other keys have others."""
    named = os.environ.get("MANTA_STATE_DIR")
    of_keys = ""
    if keys_file is not None:
        of_keys = f"-{hashlib.sha256(os.path.realpath(keys_file).encode()).hexdigest()[:12]}"
    folder = Path(named) if named else Unix("manta").user_state_path
    return folder / f"{name}{of_keys}{'.sqlite3' if name == 'records' else ''}"


class SqliteStore(RecordStore):
    """Opened when it is used first, so that an application that has it can be shipped."""

    kind = "sqlite"

    def __init__(
        self,
        path: Path | Callable[[], Path],
        max_age_s: float,
        max_bytes: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`path`: it, or what says it where the file is opened. The others: see `RecordStore`."""
        super().__init__(max_age_s, max_bytes, on_failure)
        self._path = path
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._next_clean = 0.0

    async def add(self, record: Record, age_s: float | None = None, *, lease: bool = False) -> None:
        self._check_size(record)
        now = time.time()
        head, response = encode_json(Head.of(record)), encoded(record.response)
        row = (
            *(record.owner, record.id, now, self._expiry(age_s)),
            *(record.digest, record.has_ended, record.previous, head, record.body, response),
        )
        until = now + LEASE_S if lease else None

        def write(connection: sqlite3.Connection) -> None:
            self._remove_old(connection)
            connection.execute(
                "INSERT OR REPLACE INTO records (lease, holder, owner, id, written, expires, "
                "digest, ended, previous, head, body, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (until, self._holder if lease else None, *row),
            )
            self._remove_surplus(connection)

        await self._run(write)
        if lease:
            self._held.add((record.owner, record.id))

    async def end(
        self, record: Record, response: dict[str, Any] | None = None, age_s: float | None = None
    ) -> None:
        await self._change(record, "ended = 1, lease = NULL", response, age_s)

    async def leave(
        self,
        record: Record,
        response: dict[str, Any] | None = None,
        age_s: float | None = None,
        *,
        again_in_s: float | None = None,
        is_reader: bool = False,
    ) -> None:
        lease = "NULL" if again_in_s is None else str(time.time() + again_in_s)
        await self._change(
            record, f"lease = {lease}", response, age_s, is_reader=is_reader, holder=self._holder
        )

    async def _change(
        self,
        record: Record,
        what: str,
        response: dict[str, Any] | None,
        age_s: float | None,
        *,
        is_reader: bool = False,
        holder: str | None = None,
    ) -> None:
        """Change a record that hasn't ended, unless another process than `holder` has its lease;
        nobody holds it any longer."""
        self._held.discard((record.owner, record.id))
        expires = None if age_s is None else self._expiry(age_s)
        least = "expires" if is_reader else "0"
        named = record.owner, record.id, encode_json(Head.of(record))
        row = encoded(response), expires, *named, holder, holder

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                f"UPDATE records SET {what}, holder = NULL, response = COALESCE(?, response), "
                f"expires = MAX(COALESCE(?, expires), {least}) "
                "WHERE owner = ? AND id = ? AND head = ? AND (ended = 0 OR response IS NULL) "
                "AND (? IS NULL OR holder IS NULL OR holder = ?)",
                row,
            )
            if response is not None:
                self._remove_surplus(connection)

        await self._run(write)

    async def _respond(self, record: Record, response: bytes, *, has_ended: bool) -> bool:
        row = response, record.owner, record.id, encode_json(Head.of(record)), has_ended

        def write(connection: sqlite3.Connection) -> bool:
            changed = connection.execute(
                "UPDATE records SET response = ? "
                "WHERE owner = ? AND id = ? AND head = ? AND ended = ? AND (ended OR holder = ?)",
                (*row, self._holder),
            )
            self._remove_surplus(connection)
            return changed.rowcount > 0

        return await self._run(write)

    async def add_tokens(
        self, news: Sequence[tuple[Record, bytes]], age_s: float | None = None
    ) -> None:
        expires = 0.0 if age_s is None else self._expiry(age_s)
        rows = [
            (pieces, record.owner, record.id, encode_json(Head.of(record)))
            for record, pieces in news
        ]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO tokens (record, pieces) "
                "SELECT rowid, ? FROM records WHERE owner = ? AND id = ? AND head = ?",
                rows,
            )
            connection.executemany(
                "UPDATE records SET expires = ? "
                "WHERE owner = ? AND id = ? AND head = ? AND expires < ?",
                [(expires, *named, expires) for _, *named in rows],
            )
            self._remove_surplus(connection)

        await self._run(write)

    async def tokens_of(self, record: Record) -> bytes:
        row = record.owner, record.id, encode_json(Head.of(record))

        def read(connection: sqlite3.Connection) -> bytes:
            found = connection.execute(
                "SELECT pieces FROM tokens JOIN records ON records.rowid = record "
                "WHERE owner = ? AND id = ? AND head = ? ORDER BY tokens.rowid",
                row,
            )
            return b"".join(pieces for (pieces,) in found)

        return await self._run(read)

    async def forget(self, record: Record) -> None:
        self._held.discard((record.owner, record.id))
        row = record.owner, record.id, encode_json(Head.of(record))

        def remove(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM records WHERE owner = ? AND id = ? AND head = ?", row)

        await self._run(remove)

    async def take_up(self, digests: Sequence[str]) -> list[Record]:
        if self._connection is None and not self._is_there():
            return []  # nobody has kept anything yet
        now, held = time.time(), list(self._held)

        def take(connection: sqlite3.Connection) -> list[_Row]:
            self._remove_old(connection)
            connection.executemany(
                "UPDATE records SET lease = ? "
                "WHERE lease IS NOT NULL AND holder = ? AND owner = ? AND id = ?",
                [(now + LEASE_S, self._holder, *named) for named in held],
            )
            rows: list[_Row] = connection.execute(
                f"UPDATE records SET lease = ?, holder = ? WHERE lease <= ? AND expires > ? "
                f"AND digest IN ({', '.join('?' * len(digests))}) RETURNING {_FIELDS}",
                (now + LEASE_S, self._holder, now, now, *digests),
            ).fetchall()
            return rows

        found = [_record(row) for row in await self._run(take)]
        self._held.update((record.owner, record.id) for record in found)
        return found

    async def num_leased(self) -> tuple[int, int]:
        if self._connection is None and not self._is_there():
            return 0, 0

        def count(connection: sqlite3.Connection) -> tuple[int, int]:
            found: tuple[int, int] = connection.execute(
                "SELECT COUNT(*) FILTER (WHERE lease > ?1), COUNT(*) FILTER (WHERE lease <= ?1) "
                "FROM records WHERE lease IS NOT NULL",
                (time.time(),),
            ).fetchone()
            return found

        return await self._run(count)

    async def _get(self, record_id: str, owner: str, field: str) -> Record:
        return _record(await self._run(lambda store: self._row(store, record_id, owner, field)))

    async def page(
        self,
        owner: str,
        endpoint: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool = True,
    ) -> list[Record]:
        behind, order = ("<", "DESC") if newest_first else (">", "ASC")
        listed = f"owner = ? AND {_ENDPOINT} = ? AND response IS NOT NULL AND expires > ?"

        def read(connection: sqlite3.Connection) -> list[_Row]:
            given: tuple[Any, ...] = owner, endpoint, time.time()
            where = listed
            if after is not None:
                found = connection.execute(
                    f"SELECT rowid FROM records WHERE id = ? AND {listed}", (after, *given)
                ).fetchone()
                if found is None:
                    raise no_record(after, "after")
                where, given = f"{listed} AND rowid {behind} ?", (*given, *found)
            # A record that is added gets the largest rowid.
            rows: list[_Row] = connection.execute(
                f"SELECT {_FIELDS} FROM records WHERE {where} ORDER BY rowid {order} LIMIT ?",
                (*given, limit),
            ).fetchall()
            return rows

        return [_record(row) for row in await self._run(read)]

    async def delete(self, record_id: str, owner: str) -> None:
        def remove(connection: sqlite3.Connection) -> None:
            found = connection.execute(
                "DELETE FROM records WHERE id = ? AND owner = ?", (record_id, owner)
            )
            if found.rowcount == 0:
                raise no_record(record_id)

        self._held.discard((owner, record_id))
        await self._run(remove)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        connection, self._connection = self._connection, None
        if thread is not None and connection is not None:
            await asyncio.get_running_loop().run_in_executor(thread, connection.close)
        if thread is not None:
            thread.shutdown()

    def _row(self, connection: sqlite3.Connection, record_id: str, owner: str, field: str) -> _Row:
        """The fields of a record. Raises `RequestError`."""
        found: _Row | None = connection.execute(
            f"SELECT {_FIELDS} FROM records WHERE owner = ? AND id = ? AND expires > ?",
            (owner, record_id, time.time()),
        ).fetchone()
        if found is None:
            raise no_record(record_id, field)
        return found

    def _remove_old(self, connection: sqlite3.Connection) -> None:
        """Now and then."""
        if time.monotonic() < self._next_clean:
            return
        self._next_clean = time.monotonic() + CLEAN_INTERVAL_S
        connection.execute("DELETE FROM records WHERE expires <= ?", (time.time(),))

    def _remove_surplus(self, connection: sqlite3.Connection) -> None:
        """The oldest tenth at a time, of the key that has most; what is under way goes last."""
        while _used_bytes(connection) > self._max_bytes:
            found = connection.execute(
                "SELECT owner, COUNT(*) FROM records GROUP BY owner "
                "ORDER BY SUM(LENGTH(body) + IFNULL(LENGTH(response), 0) + IFNULL((SELECT "
                "SUM(LENGTH(pieces)) FROM tokens WHERE record = records.rowid), 0)) DESC LIMIT 1"
            ).fetchone()
            if found is None:
                return
            connection.execute(
                "DELETE FROM records WHERE rowid IN "
                "(SELECT rowid FROM records WHERE owner = ? ORDER BY lease IS NOT NULL, written "
                "LIMIT ?)",
                (found[0], max(found[1] // 10, 1)),
            )

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in the store's thread, as one transaction."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "manta-records")

        def run() -> T:
            try:
                if self._connection is None:
                    self._connection = self._open()
                with self._connection as connection:
                    found = work(connection)
                self._note_answer()
                return found
            except (sqlite3.Error, OSError) as error:
                raise self._failed(self._path, error) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _is_there(self) -> bool:
        self._path = self._path() if callable(self._path) else self._path
        return self._path.exists()

    def _open(self) -> sqlite3.Connection:
        """Another process may be the first one at the same time, which SQLite doesn't wait for."""
        self._path = path = self._path() if callable(self._path) else self._path
        self._holder = uuid.uuid4().hex
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # also for its -wal and -shm
        until = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
                # Triggers also see records that make way for others of the same id.
                connection.execute("PRAGMA recursive_triggers = ON")
                connection.executescript(_SCHEMA)
                return connection
            except sqlite3.OperationalError:
                connection.close()
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)


def _record(row: _Row) -> Record:
    record_id, owner, previous, ended, head, body, response = row
    return msgspec.json.decode(head, type=Head).record(
        id=record_id,
        owner=owner,
        body=body,
        previous=previous,
        response=None if response is None else _decode(response),
        has_ended=bool(ended),
    )


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Of the file's content; what was removed is used again."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
