"""`open_store` and `open_files`: what a server's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploy.http.files.file_store import FileStore
from deploy.http.records.redis_store import RedisStore
from deploy.http.records.sqlite_store import SqliteStore, state_path
from deploy.http.records.store import RecordStore
from deploy.options import ServerOptions


def open_store(
    server: ServerOptions, on_failure: Callable[[], None] = lambda: None
) -> RecordStore | None:
    """Nothing is opened yet. `on_failure` is called whenever the store can't be used."""
    limits = server.request_store_max_age_s, server.request_store_max_bytes
    if server.request_store == "sqlite":
        named = server.request_store_path
        path = Path(named) if named else partial(state_path, "records", server.api_keys_file)
        return SqliteStore(path, *limits, on_failure)
    if server.request_store == "redis":
        assert server.request_store_url is not None  # it was checked at the start
        return RedisStore(server.request_store_url, *limits, on_failure)
    return None


def open_files(
    server: ServerOptions, on_failure: Callable[[], None] = lambda: None
) -> FileStore | None:
    """The files of batches; None where there are none. As `open_store`."""
    if "none" in (server.request_store, server.file_store):
        return None
    url = server.file_store or partial(state_path, "files", server.api_keys_file)
    return FileStore(url, server.file_max_age_s, server.file_store_max_bytes, on_failure)
