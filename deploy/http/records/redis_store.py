"""`RedisStore`: records in a Redis server, which the ingresses of several machines share.

Each change is one script, which Redis runs as a whole. Times are those of the ingresses, whose
clocks must agree within seconds. The scripts need one server or a primary with replicas, no Redis
Cluster.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from deploy.http.body import encode_json
from deploy.http.records.store import (
    LEASE_S,
    Head,
    Record,
    RecordStore,
    encoded,
    no_record,
)
from engine.errors import ConfigError

T = TypeVar("T")
PASSWORD = "MANTA_REQUEST_STORE_PASSWORD"
"""Environment variable: a password needn't stand in the URL, which configuration shows."""
TIMEOUT_S = 5.0
MAX_CONNECTIONS = 16
"""Of one ingress."""
TURN_TIMEOUT_S = 30.0
"""What finds all connections in use waits so long for one: that many ask at once doesn't mean that
Redis hangs."""
_FIELDS = ("head", "body", "previous", "ended", "response", "expires")
_decode = msgspec.json.Decoder().decode

_COMMON = """
local function named(member) return 'manta:record:' .. member end
local function owner_of(member)
  local length, rest = string.match(member, '^(%d+):(.*)$')
  return string.sub(rest, 1, tonumber(length))
end
local function listed(owner, endpoint) return 'manta:listed:' .. endpoint .. ':' .. owner end
local function list_of(member)
  local endpoint = string.match(redis.call('HGET', named(member), 'head'), '^%["([^"]*)"')
  return listed(owner_of(member), endpoint)
end
local function respond(member, response)
  local more = #response - #(redis.call('HGET', named(member), 'response') or '')
  redis.call('HSET', named(member), 'response', response)
  redis.call('HINCRBY', named(member), 'size', more)
  redis.call('HINCRBY', 'manta:sizes', owner_of(member), more)
  local place = redis.call('ZSCORE', 'manta:written:' .. owner_of(member), member)
  redis.call('ZADD', list_of(member), place, member)
end
local function forget(member)
  local owner, size = owner_of(member), redis.call('HGET', named(member), 'size')
  if not size then return 0 end
  redis.call('ZREM', list_of(member), member)
  redis.call('DEL', named(member), 'manta:tokens:' .. member)
  redis.call('ZREM', 'manta:expires', member)
  redis.call('ZREM', 'manta:leases', member)
  redis.call('ZREM', 'manta:written:' .. owner, member)
  if redis.call('HINCRBY', 'manta:sizes', owner, -size) <= 0 then
    redis.call('HDEL', 'manta:sizes', owner)
  end
  return 1
end
local function extend(member, expires)
  local until_now = tonumber(redis.call('HGET', named(member), 'expires'))
  if expires ~= '' and until_now < tonumber(expires) then
    redis.call('HSET', named(member), 'expires', expires)
    redis.call('ZADD', 'manta:expires', expires, member)
  end
end
local function forget_old(now)
  local old = redis.call('ZRANGEBYSCORE', 'manta:expires', '-inf', now, 'LIMIT', 0, 1000)
  for _, member in ipairs(old) do forget(member) end
end
local function make_room(most_bytes)
  while true do
    local sizes, total, largest, owner = redis.call('HGETALL', 'manta:sizes'), 0, -1, ''
    for at = 1, #sizes, 2 do
      local size = tonumber(sizes[at + 1])
      total = total + size
      if size > largest then largest, owner = size, sizes[at] end
    end
    if total <= tonumber(most_bytes) then return end
    local written = 'manta:written:' .. owner
    local count = math.max(math.floor(redis.call('ZCARD', written) / 10), 1)
    local oldest, at = {}, 0
    while #oldest < count do  -- what is under way goes last
      local members = redis.call('ZRANGE', written, at, at + 999)
      if #members == 0 then break end
      for _, member in ipairs(members) do
        if #oldest < count and not redis.call('ZSCORE', 'manta:leases', member) then
          oldest[#oldest + 1] = member
        end
      end
      at = at + 1000
    end
    if #oldest == 0 then oldest = redis.call('ZRANGE', written, 0, count - 1) end
    if #oldest == 0 then return end
    for _, member in ipairs(oldest) do forget(member) end
  end
end
"""
_ADD = """
local member, now, expires, lease, holder, most_bytes, response = unpack(ARGV, 1, 7)
forget_old(now)
forget(member)
local size = 0
for at = 8, #ARGV, 2 do
  redis.call('HSET', named(member), ARGV[at], ARGV[at + 1])
  size = size + #ARGV[at + 1]
end
redis.call('HSET', named(member), 'size', size, 'expires', expires)
redis.call('HINCRBY', 'manta:sizes', owner_of(member), size)
redis.call('ZADD', 'manta:expires', expires, member)
local written = 'manta:written:' .. owner_of(member)
local last = redis.call('ZREVRANGE', written, 0, 0, 'WITHSCORES')[2]
redis.call('ZADD', written, math.floor(last or 0) + 1, member)
if response ~= '' then respond(member, response) end
if lease ~= '' then
  redis.call('ZADD', 'manta:leases', lease, member)
  redis.call('HSET', named(member), 'holder', holder)
end
make_room(most_bytes)
"""
_CHANGE = """
local member, head, ended, lease, response, expires, is_reader, most_bytes, own = unpack(ARGV)
if redis.call('HGET', named(member), 'head') ~= head then return end
local holder = redis.call('HGET', named(member), 'holder')
if own ~= '' and holder and holder ~= '' and holder ~= own then return end
if redis.call('HGET', named(member), 'ended') ~= '0'
    and redis.call('HEXISTS', named(member), 'response') == 1 then return end
if ended == '1' then redis.call('HSET', named(member), 'ended', '1') end
redis.call('HDEL', named(member), 'holder')
if lease == '' then redis.call('ZREM', 'manta:leases', member)
else redis.call('ZADD', 'manta:leases', lease, member) end
if is_reader == '1' then extend(member, expires)
elseif expires ~= '' then
  redis.call('HSET', named(member), 'expires', expires)
  redis.call('ZADD', 'manta:expires', expires, member)
end
if response ~= '' then
  respond(member, response)
  make_room(most_bytes)
end
"""
_RESPOND = """
local member, head, ended, holder, response, most_bytes = unpack(ARGV)
if redis.call('HGET', named(member), 'head') ~= head
    or redis.call('HGET', named(member), 'ended') ~= ended then return 0 end
if ended == '0' and redis.call('HGET', named(member), 'holder') ~= holder then return 0 end
respond(member, response)
make_room(most_bytes)
return 1
"""
_PAGE = """
local now, owner, endpoint, after, limit, command, least, most = unpack(ARGV, 1, 8)
local list = listed(owner, endpoint)
if after ~= '' then
  local place = redis.call('ZSCORE', list, after)
  if not place or tonumber(redis.call('HGET', named(after), 'expires')) <= tonumber(now) then
    return false
  end
  least = '(' .. place
end
local found, at = {}, 0
while #found < tonumber(limit) do
  local members = redis.call(command, list, least, most, 'LIMIT', at, limit)
  if #members == 0 then break end
  for _, member in ipairs(members) do
    local fields = redis.call('HMGET', named(member), unpack(ARGV, 9))
    if tonumber(fields[#fields]) > tonumber(now) and #found < tonumber(limit) then
      found[#found + 1] = {member, fields}
    end
  end
  at = at + #members
end
return found
"""
_TAKE_UP = """
local now, lease, holder, num_digests = unpack(ARGV, 1, 4)
forget_old(now)
local served = {}
for at = 5, 4 + num_digests do served[ARGV[at]] = true end
for at = 5 + num_digests, #ARGV do
  if redis.call('HGET', named(ARGV[at]), 'holder') == holder then
    redis.call('ZADD', 'manta:leases', 'XX', lease, ARGV[at])
  end
end
local found = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', 'manta:leases', '-inf', now)) do
  if served[redis.call('HGET', named(member), 'digest')] then
    redis.call('ZADD', 'manta:leases', lease, member)
    redis.call('HSET', named(member), 'holder', holder)
    found[#found + 1] = member
  end
end
return found
"""
_ADD_TOKENS = """
for at = 3, #ARGV, 3 do
  local member, head, pieces = unpack(ARGV, at, at + 2)
  if redis.call('HGET', named(member), 'head') == head then
    redis.call('APPEND', 'manta:tokens:' .. member, pieces)
    redis.call('HINCRBY', named(member), 'size', #pieces)
    redis.call('HINCRBY', 'manta:sizes', owner_of(member), #pieces)
    extend(member, ARGV[2])
  end
end
make_room(ARGV[1])
"""
_TOKENS = """
local member, head = unpack(ARGV)
if redis.call('HGET', named(member), 'head') ~= head then return '' end
return redis.call('GET', 'manta:tokens:' .. member) or ''
"""
_FORGET = """
if ARGV[2] and redis.call('HGET', named(ARGV[1]), 'head') ~= ARGV[2] then return 0 end
return forget(ARGV[1])
"""


class RedisStore(RecordStore):
    """Connects when it is used first, so that an application that has it can be shipped."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        max_age_s: float,
        max_bytes: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`url`: as `redis://host:6379/0`, or `rediss://` for TLS. Others: see `RecordStore`."""
        super().__init__(max_age_s, max_bytes, on_failure)
        self._url = url
        self._client: Any = None
        self._scripts: dict[str, Any] = {}

    async def add(self, record: Record, age_s: float | None = None, *, lease: bool = False) -> None:
        self._check_size(record)
        now = time.time()
        fields: list[Any] = ["head", encode_json(Head.of(record)), "body", record.body]
        fields += ["ended", int(record.has_ended), "digest", record.digest]
        if record.previous is not None:
            fields += ["previous", record.previous]
        response = encoded(record.response) or b""
        expires = self._expiry(age_s)
        until = now + LEASE_S if lease else ""

        async def work() -> None:
            given = _member(record.id, record.owner), now, expires, until, self._holder
            await self._scripts["add"](args=[*given, self._max_bytes, response, *fields])

        await self._run(work)
        if lease:
            self._held.add((record.owner, record.id))

    async def end(
        self, record: Record, response: dict[str, Any] | None = None, age_s: float | None = None
    ) -> None:
        await self._change(record, 1, "", response, age_s)

    async def leave(
        self,
        record: Record,
        response: dict[str, Any] | None = None,
        age_s: float | None = None,
        *,
        again_in_s: float | None = None,
        is_reader: bool = False,
    ) -> None:
        lease = "" if again_in_s is None else time.time() + again_in_s
        await self._change(
            record, 0, lease, response, age_s, is_reader=is_reader, holder=self._holder
        )

    async def _change(
        self,
        record: Record,
        ended: int,
        lease: float | str,
        response: dict[str, Any] | None,
        age_s: float | None,
        *,
        is_reader: bool = False,
        holder: str = "",
    ) -> None:
        """Change a record that hasn't ended, unless another process than `holder` has its lease;
        nobody holds it any longer."""
        self._held.discard((record.owner, record.id))
        expires = "" if age_s is None else self._expiry(age_s)
        member = _member(record.id, record.owner)
        head = encode_json(Head.of(record))
        kept = encoded(response) or b""
        given = (
            *(member, head, ended, lease, kept, expires, int(is_reader)),
            *(self._max_bytes, holder),
        )
        await self._run(lambda: self._scripts["change"](args=given))

    async def _respond(self, record: Record, response: bytes, *, has_ended: bool) -> bool:
        member, head = _member(record.id, record.owner), encode_json(Head.of(record))

        async def work() -> bool:
            given = member, head, int(has_ended), self._holder, response, self._max_bytes
            return bool(await self._scripts["respond"](args=given))

        return await self._run(work)

    async def add_tokens(
        self, news: Sequence[tuple[Record, bytes]], age_s: float | None = None
    ) -> None:
        given: list[Any] = [self._max_bytes, "" if age_s is None else self._expiry(age_s)]
        for record, pieces in news:
            given += (_member(record.id, record.owner), encode_json(Head.of(record)), pieces)
        await self._run(lambda: self._scripts["add_tokens"](args=given))

    async def tokens_of(self, record: Record) -> bytes:
        given = _member(record.id, record.owner), encode_json(Head.of(record))

        async def work() -> bytes:
            found: bytes = await self._scripts["tokens"](args=given)
            return found

        return await self._run(work)

    async def forget(self, record: Record) -> None:
        self._held.discard((record.owner, record.id))
        given = _member(record.id, record.owner), encode_json(Head.of(record))
        await self._run(lambda: self._scripts["forget"](args=given))

    async def take_up(self, digests: Sequence[str]) -> list[Record]:
        async def work() -> list[bytes]:
            now = time.time()
            held = [_member(name, owner) for owner, name in self._held]
            found: list[bytes] = await self._scripts["take_up"](
                args=[now, now + LEASE_S, self._holder, len(digests), *digests, *held]
            )
            return found

        taken = [await self._find(member) for member in await self._run(work)]
        found = [record for record in taken if record is not None]
        self._held.update((record.owner, record.id) for record in found)
        return found

    async def num_leased(self) -> tuple[int, int]:
        async def work() -> tuple[int, int]:
            now = time.time()
            made = await self._client.zcount("manta:leases", f"({now}", "+inf")
            return made, await self._client.zcount("manta:leases", "-inf", now)

        return await self._run(work)

    async def _get(self, record_id: str, owner: str, field: str) -> Record:
        record = await self._find(_member(record_id, owner))
        if record is None:
            raise no_record(record_id, field)
        return record

    async def page(
        self,
        owner: str,
        endpoint: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool = True,
    ) -> list[Record]:
        behind = b"" if after is None else _member(after, owner)
        order = "ZREVRANGEBYSCORE +inf -inf" if newest_first else "ZRANGEBYSCORE -inf +inf"
        given = time.time(), owner, endpoint, behind, limit, *order.split(), *_FIELDS
        found = await self._run(lambda: self._scripts["page"](args=given))
        if found is None:
            raise no_record(after or "", "after")
        return [_record(member, fields) for member, fields in found]

    async def delete(self, record_id: str, owner: str) -> None:
        member = _member(record_id, owner)
        self._held.discard((owner, record_id))
        if not await self._run(lambda: self._scripts["forget"](args=[member])):
            raise no_record(record_id)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _find(self, member: bytes) -> Record | None:
        async def work() -> list[bytes | None]:
            found: list[bytes | None] = await self._client.hmget(b"manta:record:" + member, _FIELDS)
            return found

        fields = await self._run(work)
        if fields[0] is None or float(fields[-1] or 0) <= time.time():
            return None
        return _record(member, fields)

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        from redis import RedisError

        try:
            if self._client is None:
                self._connect()
            found = await work()
            self._note_answer()
            return found
        except (RedisError, OSError, TimeoutError) as error:
            raise self._failed("Redis", error) from error

    def _connect(self) -> None:
        """It connects with the first command, and again whenever the connection is lost."""
        from redis.asyncio import BlockingConnectionPool, Redis

        options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        if password := os.environ.get(PASSWORD):
            options["password"] = password
        self._holder = uuid.uuid4().hex
        pool = BlockingConnectionPool.from_url(
            self._url, max_connections=MAX_CONNECTIONS, timeout=TURN_TIMEOUT_S, **options
        )
        self._client = Redis.from_pool(pool)
        scripts = {"add": _ADD, "change": _CHANGE, "take_up": _TAKE_UP, "forget": _FORGET}
        scripts |= {"add_tokens": _ADD_TOKENS, "tokens": _TOKENS}
        scripts |= {"respond": _RESPOND, "page": _PAGE}
        self._scripts = {
            name: self._client.register_script(_COMMON + text) for name, text in scripts.items()
        }


def check_redis_url(url: str | None) -> None:
    """Raise `ConfigError` unless this is the URL of a Redis server, and there is its client."""
    try:
        from redis.asyncio import Redis
    except ModuleNotFoundError:
        raise ConfigError(
            "request_store: redis needs Redis' client, which isn't installed; install it with pip "
            "install 'manta-serve[redis]'."
        ) from None
    if url is None:
        raise ConfigError(
            "request_store: redis needs request_store_url, as redis://host:6379/0; set it."
        )
    try:
        Redis.from_url(url)
    except ValueError as error:
        raise ConfigError(f"request_store_url is no address of Redis: {error}") from None


def _member(record_id: str, owner: str) -> bytes:
    """Names a record in Redis. No two have the same."""
    named = owner.encode()
    return b"%d:%b:%b" % (len(named), named, record_id.encode())


def _record(member: bytes, fields: Sequence[Any]) -> Record:
    """The record of this name, whose hash has these `_FIELDS`."""
    head, body, previous, ended, response, _ = fields
    _, _, rest = member.partition(b":")
    length = int(member[: -len(rest) - 1])
    owner, record_id = rest[:length], rest[length + 1 :]
    return msgspec.json.decode(head, type=Head).record(
        id=record_id.decode(),
        owner=owner.decode(),
        body=body,
        previous=None if previous is None else previous.decode(),
        response=None if response is None else _decode(response),
        has_ended=ended == b"1",
    )
