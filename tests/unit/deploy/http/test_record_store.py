"""Stores of requests: what they hold, for how long, and in how much room."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from redis import Redis

from benchmarks.servers import free_port
from deploy.http.records import sqlite_store
from deploy.http.records.opening import open_store
from deploy.http.records.redis_store import RedisStore
from deploy.http.records.sqlite_store import SqliteStore, state_path
from deploy.http.records.store import LEASE_S, MAX_CHAIN, Record, RecordStore
from deploy.options import ServerOptions
from deploy.start.config import AppConfig
from engine.errors import ConfigError, RequestError
from tests.support.redis_server import redis_server

DAY = 24 * 3600.0


def record(name: str, owner: str = "", previous: str | None = None, size: int = 0) -> Record:
    return Record(
        id=name,
        owner=owner,
        endpoint="responses",
        request_id=f"of {name}",
        seed=2**128 - 1 - size,
        created=1_700_000_000,
        digest="d",
        body=name.encode() + b"x" * size,
        previous=previous,
        response={"output": [], "status": "in_progress", "n": 10**30},
    )


class Place:
    """Where the stores of one server keep records. `clear` makes it empty."""

    def __init__(self, url: str | None, folder: Path) -> None:
        """`url`: of Redis; None: a file."""
        self._url, self._folder, self._number = url, folder, 0

    def clear(self) -> None:
        if self._url is not None:
            with Redis.from_url(self._url) as client:
                client.flushall()
        self._number += 1

    def open(self, max_age_s: float, max_bytes: int) -> RecordStore:
        """As one process does."""
        if self._url is not None:
            return RedisStore(self._url, max_age_s, max_bytes)
        return SqliteStore(self._folder / f"r{self._number}", max_age_s, max_bytes)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    made = Place(url, tmp_path)
    made.clear()
    return made


def run(store: RecordStore, scenario: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        try:
            await scenario()
        finally:
            await store.close()

    asyncio.run(all_of_it())


async def missing(call: Awaitable[object]) -> bool:
    try:
        await call
    except RequestError as error:
        assert error.status == 404, error
        return True
    return False


OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "end", "leave", "get", "delete", "reopen", "other process"]),
        st.integers(0, 4),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=40,
)


@given(ops=OPS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_is_a_dictionary(ops: list[tuple[str, int, str]], place: Place) -> None:
    place.clear()
    stores = [place.open(DAY, 1 << 24), place.open(DAY, 1 << 24)]
    held: dict[tuple[str, int], Record] = {}

    async def play() -> None:
        at = 0
        for count, (kind, number, owner) in enumerate(ops):
            store, key, name = stores[at], (owner, number), f"r{number}"
            if kind == "add" and key not in held:
                held[key] = record(name, owner, size=count)
                await store.add(held[key])
            elif kind in ("add", "end", "leave"):
                response = {"output": [{"n": count}], "status": "completed"}
                # Nothing happens to one that isn't there, or has ended.
                one = held.get(key, record(name, owner))
                if kind == "leave":
                    await store.leave(one, response)
                else:
                    await store.end(one, response)
                if key in held and not held[key].has_ended:
                    held[key].response, held[key].has_ended = response, kind != "leave"
            elif kind == "get":
                if key in held:
                    assert await store.get(name, owner) == held[key]
                else:
                    assert await missing(store.get(name, owner))
            elif kind == "delete":
                assert await missing(store.delete(name, owner)) == (key not in held)
                held.pop(key, None)
            elif kind == "reopen":
                await store.close()
            else:
                at = 1 - at
        for store in stores:
            await store.close()

    asyncio.run(play())


PAGED_OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "stream", "progress", "end", "leave", "delete"]),
        st.integers(0, 5),
    ),
    max_size=30,
)


@given(ops=PAGED_OPS, limit=st.integers(1, 4))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages(ops: list[tuple[str, int]], limit: int, place: Place) -> None:
    """They hold what has a response, in the order of its being added, whatever happened since."""
    place.clear()
    store = place.open(DAY, 1 << 24)
    added: dict[str, Record] = {}

    async def walked(newest_first: bool) -> list[Record]:
        found: list[Record] = []
        while len(found) % limit == 0:
            after = found[-1].id if found else None
            page = await store.page("a", "e", after=after, limit=limit, newest_first=newest_first)
            if not page:
                break
            found += page
        return found

    async def scenario() -> None:
        await store.add(record("other", "a"))
        await store.add(msgspec.structs.replace(record("r1", "b"), endpoint="e"))
        for count, (kind, number) in enumerate(ops):
            response = {"n": count}
            if kind in ("add", "stream"):
                one = msgspec.structs.replace(record(f"r{number}", "a", size=count), endpoint="e")
                one.response = response if kind == "add" else None
                added.pop(one.id, None)
                added[one.id] = one
                await store.add(one, lease=kind == "add")
                continue
            if (found := added.get(f"r{number}")) is None:
                continue
            if kind == "delete":
                await store.delete(found.id, "a")
                del added[found.id]
            elif not found.has_ended:
                if kind == "progress":
                    await store.progress(found, response)
                    continue
                await (store.end if kind == "end" else store.leave)(found, response)
                found.has_ended, found.response = kind == "end", response
        listed = [one.id for one in added.values() if one.response is not None]
        assert [one.id for one in await walked(False)] == listed
        assert [one.id for one in await walked(True)] == listed[::-1]
        for one in await walked(True):
            assert one == await store.get(one.id, "a")
            assert one.has_ended == added[one.id].has_ended
        for name in ("other", "r9", *added.keys() - set(listed)):
            with pytest.raises(RequestError) as refused:
                await store.page("a", "e", after=name, limit=1)
            assert (refused.value.status, refused.value.param) == (404, "after")

    run(store, scenario)


def test_pages_without_the_old(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open(DAY, 1 << 24)
    start = time.time()

    async def scenario() -> None:
        for number in range(6):
            await store.add(record(f"r{number}"), 10.0 if number % 3 else None)
        monkeypatch.setattr(sqlite_store.time, "time", lambda: start + 60)
        page = await store.page("", "responses", after=None, limit=2)
        assert [one.id for one in page] == ["r3", "r0"]
        assert await missing(store.page("", "responses", after="r4", limit=2))

    run(store, scenario)


def test_progress(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is kept of whoever has the lease, and of nobody else."""
    first, second = place.open(DAY, 1 << 24), place.open(DAY, 1 << 24)
    start = time.time()

    async def response_of(name: str) -> dict[str, object] | None:
        return (await first.get(name, "")).response

    async def scenario() -> None:
        for name in ("r", "ended", "left", "deleted", "again"):
            await first.add(record(name), lease=True)
        assert await first.progress(record("r"), {"n": 1}) and await response_of("r") == {"n": 1}
        assert not await second.progress(record("r"), {"n": 2})
        await first.end(record("ended"), {"n": 1})
        await first.leave(record("left"), {"n": 1}, again_in_s=60.0)
        await first.delete("deleted", "")
        await first.add(record("again", size=1), lease=True)
        for name in ("ended", "left", "deleted", "again"):
            assert not await first.progress(record(name), {"n": 2}), name
        assert await response_of("ended") == {"n": 1} == await response_of("left")
        assert await missing(first.get("deleted", ""))
        monkeypatch.setattr(sqlite_store.time, "time", lambda: start + LEASE_S + 1)
        assert "r" in [one.id for one in await second.take_up(["d"])]
        assert not await first.progress(record("r"), {"n": 3})
        assert await second.progress(record("r"), {"n": 4}) and await response_of("r") == {"n": 4}
        await second.close()

    run(first, scenario)


def test_tokens(place: Place) -> None:
    """Are kept as long as their record, and no longer, in the order of their being written."""
    store = place.open(DAY, limit := 1 << 20)
    first, second = record("r", size=1), record("r", size=2)

    async def scenario() -> None:
        await store.add(first)
        await store.add(record("s"))
        await store.add_tokens([(first, b"1"), (record("s"), b"x"), (record("none"), b"y")])
        await store.add_tokens([(first, b"2")])
        assert await store.tokens_of(first) == b"12"
        assert await store.tokens_of(record("s")) == b"x"
        await store.end(first)
        assert await store.tokens_of(first) == b"12"
        await store.add(second)  # it takes the place of the first
        await store.add_tokens([(first, b"3")])
        assert await store.tokens_of(first) == b"" == await store.tokens_of(second)
        await store.add_tokens([(second, b"4")])
        await store.delete("r", "")
        assert await store.tokens_of(second) == b""
        await store.add(second)
        assert await store.tokens_of(second) == b"", "its place is another one's now"
        for number in range(100):
            await store.add(record(f"r{number}"))
            await store.add_tokens([(record(f"r{number}"), b"x" * (limit // 20))])
        assert await missing(store.get("r1", "")), "tokens take room"
        await store.get("r99", "")

    run(store, scenario)


def test_who_leaves_a_record_to_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doesn't shorten its time; who writes its tokens lengthens it."""
    store = place.open(DAY, 1 << 24)
    start = time.time()

    def at(seconds: float) -> None:
        monkeypatch.setattr(sqlite_store.time, "time", lambda: start + seconds)

    async def scenario() -> None:
        for name in ("read", "left", "long"):
            await store.add(record(name), 1000.0)
        await store.leave(record("read"), None, 10.0, is_reader=True)
        await store.leave(record("left"), None, 10.0)
        await store.leave(record("long"), None, 10.0)
        at(9)
        await store.add_tokens([(record("long"), b"1"), (record("read"), b"1")], 10.0)
        at(18)
        assert await missing(store.get("left", ""))
        await store.get("long", "")
        await store.leave(record("long"), None, 10.0, is_reader=True)
        at(27)
        await store.get("long", "")
        at(29)
        assert await missing(store.get("long", ""))
        at(999)
        await store.get("read", "")

    run(store, scenario)


def test_another_response(place: Place) -> None:
    """Of a record that has ended, and of no other one."""
    store = place.open(DAY, 1 << 24)

    async def scenario() -> None:
        for name in ("r", "s"):
            await store.add(record(name))
            assert await missing(store.amend(record(name), {"n": 1}))
            await store.end(record(name), {"n": 2})
        await store.amend(record("r"), {"n": 3})
        assert (await store.get("r", "")).response == {"n": 3}
        page = await store.page("", "responses", after=None, limit=2, newest_first=False)
        assert [one.id for one in page] == ["r", "s"]
        await store.delete("r", "")
        assert await missing(store.amend(record("r"), {"n": 4}))

    run(store, scenario)


def test_conversations(place: Place) -> None:
    store = place.open(DAY, 1 << 26)

    async def scenario() -> None:
        previous: str | None = None
        for number in range(MAX_CHAIN + 1):
            await store.add(record(f"r{number}", "a", previous))
            previous = f"r{number}"
        found = await store.conversation(f"r{MAX_CHAIN - 1}", "a")
        assert [one.id for one in found] == [f"r{number}" for number in range(MAX_CHAIN)]
        with pytest.raises(RequestError, match="more than"):
            await store.conversation(f"r{MAX_CHAIN}", "a")
        assert await missing(store.conversation("r3", "b"))
        await store.delete("r1", "a")
        assert await missing(store.conversation("r3", "a"))

    run(store, scenario)


def test_old_records_leave(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open(100.0, 1 << 24)
    now = time.time()

    async def scenario() -> None:
        await store.add(record("old"))
        monkeypatch.setattr(sqlite_store.time, "time", lambda: now + 101)
        assert await missing(store.get("old", ""))
        if isinstance(store, SqliteStore):
            store._next_clean = 0.0
        await store.take_up([])  # as every few seconds
        await store.add(record("new"))
        monkeypatch.setattr(sqlite_store.time, "time", lambda: now)
        assert await missing(store.get("old", "")), "it is only hidden"
        await store.get("new", "")

    run(store, scenario)


def test_leases(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost process was making is taken up by one other; what lives is left to who has it."""
    first, second, third = (place.open(DAY, 1 << 24) for _ in range(3))
    start = time.time()

    def at(seconds: float) -> None:
        monkeypatch.setattr(sqlite_store.time, "time", lambda: start + seconds)

    async def taken(store: SqliteStore) -> list[str]:
        return sorted(one.id for one in await store.take_up(["d"]))

    async def scenario() -> None:
        assert await taken(third) == []  # there is no file yet
        for name in ("a", "b", "ended", "left", "gone"):
            await first.add(record(name), lease=True)
        await first.add(record("stream"))
        await first.end(record("ended"), {"status": "completed"})
        await first.leave(record("left"), {"status": "cancelled"})
        await first.delete("gone", "")
        at(LEASE_S - 1)
        assert await taken(second) == [] == await taken(first)
        assert await second.num_leased() == (2, 0)
        at(2 * LEASE_S - 2)
        assert await taken(second) == []  # the first has renewed them
        at(2 * LEASE_S)
        assert await third.num_leased() == (0, 2)
        found = await asyncio.gather(taken(second), taken(third))
        assert sorted(found) == [[], ["a", "b"]]
        at(2 * LEASE_S + 1)
        assert await taken(first) == [], "it has them no longer"
        holder, other = (second, third) if found[0] else (third, second)
        await other.leave(record("a"))  # which isn't its own
        await holder.leave(record("a"), again_in_s=3.0)
        await holder.leave(record("b"), again_in_s=3.0)
        at(2 * LEASE_S + 3)
        assert await taken(first) == []
        at(2 * LEASE_S + 5)
        assert await taken(first) == ["a", "b"]
        first._held.clear()  # it has given them up, and couldn't say so
        at(3 * LEASE_S)
        assert await taken(first) == []
        at(3 * LEASE_S + 6)
        assert await taken(second) == ["a", "b"]
        await second.close()
        await third.close()

    run(first, scenario)


def test_it_stays_within_its_limit(place: Place) -> None:
    """The newest stay. The key that has most makes room."""
    store = place.open(DAY, limit := 1 << 20)

    async def scenario() -> None:
        for number in range(1500):
            await store.add(record(f"r{number}", size=2000))
        assert await missing(store.get("r0", ""))
        for number in range(1400, 1500):
            await store.get(f"r{number}", "")
        with pytest.raises(RequestError, match="too large"):
            await store.add(record("huge", size=limit))
        await store.get("r1499", "")
        await store.add(record("small", "other"))
        for number in range(500):
            await store.add(record(f"s{number}", size=2000))
        await store.get("small", "other")

    run(store, scenario)


def test_records_of_the_same_id(place: Place) -> None:
    """The later one counts, and what is said of the earlier one doesn't touch it."""
    store = place.open(DAY, 1 << 24)
    first, second = record("r", size=1), record("r", size=2)

    async def scenario() -> None:
        await store.add(first, lease=True)
        await store.add(second, lease=True)
        await store.end(first, {"status": "completed"})
        await store.leave(first, again_in_s=0.0)
        await store.forget(first)
        assert await store.get("r", "") == second
        await store.end(second, {"status": "completed"})
        assert (await store.get("r", "")).has_ended
        await store.forget(second)
        assert await missing(store.get("r", ""))
        await store.forget(second)

    run(store, scenario)


def test_a_stream_that_ended_stays_ended(place: Place) -> None:
    """Also while somebody reads it again, which changes its age alone."""
    store = place.open(DAY, 1 << 24)
    stream = record("r")
    stream.response = None

    async def scenario() -> None:
        await store.add(stream, 60.0)
        await store.end(stream, age_s=60.0)
        await store.leave(stream, age_s=120.0)
        assert (await store.get("r", "")).has_ended

    run(store, scenario)


def test_only_what_is_served_here_is_taken_up(place: Place) -> None:
    store = place.open(DAY, 1 << 24)

    async def scenario() -> None:
        await store.add(record("r"), lease=True)
        await store.leave(record("r"), again_in_s=-1.0)
        assert await store.take_up([]) == [] == await store.take_up(["other", "more"])
        (found,) = await store.take_up(["other", "d"])
        assert found.id == "r"

    run(store, scenario)


def test_the_file_doesnt_grow(tmp_path: Path) -> None:
    """With what went through it."""
    limit, path = 1 << 20, tmp_path / "r"
    store = SqliteStore(path, DAY, limit)

    async def scenario() -> None:
        most = 0
        for number in range(1500):
            await store.add(record(f"r{number}", size=2000))
            files = [path.with_name(path.name + end) for end in ("", "-wal")]
            most = max(most, sum(file.stat().st_size for file in files if file.exists()))
        assert most < 1.2 * limit + 2 * sqlite_store.WAL_BYTES

    run(store, scenario)


def test_redis_forgets_all_of_a_record(redis_url: str) -> None:
    store = RedisStore(redis_url, DAY, 1 << 20)

    async def scenario() -> None:
        for number in range(1500):
            one = record(f"r{number}", f"o{number % 3}", size=2000)
            await store.add(one, lease=True)
            await store.add_tokens([(one, b"1234")])
        with Redis.from_url(redis_url) as client:
            sizes = sum(int(size) for size in client.hgetall("manta:sizes").values())
            kept = client.zcard("manta:expires")
            assert 0 < sizes <= 1 << 20 and kept == client.zcard("manta:leases")
            assert len(list(client.scan_iter("manta:record:*"))) == kept
            for member in client.zrange("manta:expires", 0, -1):
                _, owner, name = member.decode().split(":")
                await store.delete(name, owner)
            assert client.dbsize() == 0

    with Redis.from_url(redis_url) as client:
        client.flushall()
    run(store, scenario)


def test_redis_that_is_away(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and counted; the store works again with its server."""
    failures: list[None] = []
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    store = RedisStore(url, DAY, 1 << 20, lambda: failures.append(None))

    async def scenario() -> None:
        for _ in range(2):
            with pytest.raises(RequestError) as refused:
                await store.add(record("r"))
            assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
        assert len(failures) == 2 and "Redis" in caplog.text
        for _ in range(2):
            with redis_server(port):
                await store.add(record("r"))
                assert (await store.get("r", "")).id == "r"
            with pytest.raises(RequestError):
                await store.get("r", "")

    run(store, scenario)


def test_many_at_once(place: Place) -> None:
    """Two processes' connections write at the same time; nothing is lost."""
    stores = [place.open(DAY, 1 << 26) for _ in range(2)]

    async def scenario() -> None:
        puts = (stores[n % 2].add(record(f"r{n}")) for n in range(400))
        await asyncio.gather(*puts)
        for n in range(400):
            await stores[1].get(f"r{n}", "")
        await stores[0].close()

    run(stores[1], scenario)


def test_the_first_processes_come_at_once(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "r", DAY, 1 << 24) for _ in range(6)]

    async def scenario() -> None:
        await asyncio.gather(*(store.add(record(f"r{n}")) for n, store in enumerate(stores)))
        for store in stores[1:]:
            await store.close()

    run(stores[0], scenario)


def test_others_may_not_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.sqlite3"
    store = SqliteStore(path, DAY, 1 << 24)

    async def scenario() -> None:
        await store.add(record("r"))
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    old = os.umask(0)
    try:
        run(store, scenario)
    finally:
        os.umask(old)


def test_it_can_be_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cloudpickle.loads(cloudpickle.dumps(open_store(ServerOptions())))
    monkeypatch.setenv("MANTA_STATE_DIR", str(tmp_path))
    assert state_path("records") == tmp_path / "records.sqlite3"
    assert state_path("records", "/a/keys.yaml") not in (
        state_path("records"),
        state_path("records", "/b/keys.yaml"),
    )
    assert state_path("records", "/a/../a/keys.yaml") == state_path("records", "/a/keys.yaml")
    monkeypatch.delenv("MANTA_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_path("records") == Path("/state/manta/records.sqlite3")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "needs request_store_url"),
        ({"request_store_url": "http://x"}, "no address of Redis"),
        ({"request_store_url": "redis://host:port/0"}, "no address of Redis"),
    ],
)
def test_what_is_refused_at_the_start(more: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AppConfig.from_args({"model": "models/manta-small", "request_store": "redis", **more})


def test_what_is_under_way_is_removed_last(place: Place) -> None:
    async def scenario() -> None:
        store = place.open(DAY, 2**20)
        await store.add(record("running", size=1000), lease=True)
        for number in range(40):
            await store.add(record(f"old {number}", size=100_000))
        assert (await store.get("running", "")).id == "running"
        with pytest.raises(RequestError):
            await store.get("old 0", "")
        await store.close()

    asyncio.run(scenario())


def test_who_lost_a_lease_cant_leave_the_record(place: Place) -> None:
    """Another process has it."""

    async def scenario() -> None:
        first, second = place.open(DAY, 2**20), place.open(DAY, 2**20)
        mine = record("r")
        await first.add(mine, lease=True)
        await first.leave(mine, again_in_s=0.0)
        (taken,) = await second.take_up(["d"])
        await first.leave(mine, again_in_s=0.0)
        assert not await first.take_up(["d"])
        assert await second.progress(taken, {"n": 1})
        await second.leave(taken, again_in_s=0.0)
        assert len(await first.take_up(["d"])) == 1
        await first.close()
        await second.close()

    asyncio.run(scenario())


def test_any_process_may_leave_what_has_no_lease(place: Place) -> None:
    """A stream is read on at another ingress than where it was begun."""

    async def scenario() -> None:
        first, second = place.open(DAY, 2**20), place.open(DAY, 2**20)
        await first.add(record("r"))
        await second.leave(record("r"), {"n": 1})
        assert (await first.get("r", "")).response == {"n": 1}
        await first.close()
        await second.close()

    asyncio.run(scenario())
