"""The clients of hostile_clients.py: each sends one kind of hostile load to a server.

    python benchmarks/hostile_attacks.py NAME --port N --pid PID

Prints the statuses that it got as one line of JSON. It runs in a process of its own, beside the
process that reads the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.start.processes import marked_processes
from tests.support.processes import launch_mark

JUST_BELOW = 4 * 2**20 - 1024
TYPE = b"Content-Type: application/json\r\n"
HALF_SENT = 2000
HELD_S = 4.0
CUT = 500
ZMQ_BYTES = 10**9
ZMQ_LIMIT_S = 20.0
HEALTH_PER_S, HEALTH_S = 500, 10
Statuses = Counter[str]


def request(path: str, body: bytes) -> bytes:
    """A request whose connection ends with its answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + TYPE + b"Connection: close\r\n\r\n" + body


async def send(port: int, data: bytes) -> str:
    """The status of the answer to raw bytes; "cut" if there is none."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            async with asyncio.timeout(60):
                line = await reader.readline()
            while await reader.read(65536):
                pass
        finally:
            writer.close()
    except OSError as error:
        return type(error).__name__
    return line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "cut"


async def one(port: int, path: str, body: Any) -> Statuses:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Counter([await send(port, request(path, data))])


async def chat(port: int, pid: int) -> Statuses:
    """2,048 messages that fill the body, and one message that does."""
    text = "a b " * (JUST_BELOW // 2048 // 4 - 20)
    messages = [{"role": "user", "content": text}] * 2048
    many = await one(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    long = [{"role": "user", "content": "word " * (JUST_BELOW // 5 - 100)}]
    return many + await one(port, "/v1/chat/completions", {"messages": long, "max_tokens": 1})


async def text(port: int, pid: int) -> Statuses:
    return await one(port, "/v1/completions", {"prompt": "x = 1\n" * (JUST_BELOW // 7 - 20)})


async def schema(port: int, pid: int) -> Statuses:
    count = (JUST_BELOW - 300) // 40
    properties = {f"property_{i:07d}": {"type": "string"} for i in range(count)}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"properties": properties}},
        },
    }
    return await one(port, "/v1/chat/completions", json.dumps(body).encode())


async def body_of_22_mib(port: int, pid: int) -> Statuses:
    return await one(port, "/v1/completions", b'{"prompt": "%s"}' % (b"x" * (22 * 2**20)))


async def prompt_logprobs(port: int, pid: int) -> Statuses:
    body = {"prompt": [10 + i % 4000 for i in range(4000)], "n": 128, "max_tokens": 1}
    refused = await one(port, "/v1/completions", {**body, "prompt_logprobs": 20})
    # What is let in: as many as one request may report.
    fits = {**body, "n": 1, "prompt_logprobs": 20}
    return refused + await one(port, "/v1/completions", fits)


async def stop_ids(port: int, pid: int) -> Statuses:
    ids = [10 + i % 4000 for i in range(10**5)]
    return await one(port, "/v1/completions", {"prompt": "x", "stop_token_ids": ids})


async def half_sent(port: int, pid: int) -> Statuses:
    """Connections that stop in their headers or in their body, and stay."""
    whole = request("/v1/completions", json.dumps({"prompt": "x" * 200}).encode())
    opened = []
    for i in range(HALF_SENT):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.send(whole[: 40 if i % 2 else len(whole) - 50])
        opened.append(connection)
        if i % 50 == 0:
            await asyncio.sleep(0.01)
    await asyncio.sleep(HELD_S)
    for connection in opened:
        connection.close()
    return Counter({"held": len(opened)})


async def zeromq(port: int, pid: int) -> Statuses:
    """Bytes to every TCP port of the server's own sockets, first as ZeroMQ begins, then noise."""
    ports = zmq_ports(pid)
    if not ports:
        return Counter({"no sockets": 1})
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    noise = random.Random(1).randbytes(2**20)
    sent = Counter({"sockets": len(ports)})
    until = time.monotonic() + ZMQ_LIMIT_S
    while sent["MB"] < ZMQ_BYTES // 10**6 and time.monotonic() < until:
        for host, number in ports:
            try:
                with socket.create_connection((host, number), timeout=1) as connection:
                    connection.sendall(greeting)
                    for _ in range(16):
                        connection.sendall(noise)
                        sent["MB"] += 1
            except OSError:
                sent["refused"] += 1
            await asyncio.sleep(0)
    return sent


def zmq_ports(pid: int) -> list[tuple[str, int]]:
    """Addresses on which the server's processes listen and answer as ZeroMQ does."""
    inodes = set()
    for each in marked_processes(launch_mark(pid)):
        try:
            for name in os.listdir(f"/proc/{each}/fd"):
                target = os.readlink(f"/proc/{each}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            continue
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            raw, number = fields[1].split(":")
            host = ".".join(str(part) for part in reversed(bytes.fromhex(raw)))
            found.append(("127.0.0.1" if host == "0.0.0.0" else host, int(number, 16)))
    return [address for address in found if _speaks_zeromq(address)]


def _speaks_zeromq(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=0.3) as connection:
            connection.settimeout(0.3)
            return connection.recv(1) == b"\xff"
    except OSError:
        return False


async def health(port: int, pid: int) -> Statuses:
    """`/health` on 20 connections, as often in all as the name says."""
    found: Statuses = Counter()
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def keep_asking(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = time.monotonic()
        for i in range(HEALTH_PER_S * HEALTH_S // 20):
            wait_s = begun + (i + number / 20) * 20 / HEALTH_PER_S - time.monotonic()
            await asyncio.sleep(max(0.0, wait_s))
            writer.write(ask)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            found[head.split(b" ")[1].decode()] += 1
        writer.close()

    await asyncio.gather(*map(keep_asking, range(20)))
    return found


async def cut(port: int, pid: int) -> Statuses:
    """Requests whose client leaves: in the headers, in the body, or while it is answered."""
    rng = random.Random(2)
    body = {"prompt": [7, 8, 9], "max_tokens": 400, "ignore_eos": True, "stream": True}
    whole = request("/v1/completions", json.dumps(body).encode())

    async def leave(at: int, stay_s: float) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole[:at])
        await asyncio.sleep(stay_s)
        writer.transport.abort()

    for _ in range(CUT // 20):
        places = [rng.choice([rng.randrange(len(whole)), len(whole)]) for _ in range(20)]
        await asyncio.gather(*(leave(at, rng.random() / 4) for at in places))
    return Counter({"cut": CUT})


ATTACKS: dict[str, Callable[[int, int], Awaitable[Statuses]]] = {
    "a chat just below 4 MiB": chat,
    "a text just below 4 MiB": text,
    "a schema just below 4 MiB": schema,
    "a body of 22 MiB": body_of_22_mib,
    "prompt_logprobs 20, n 128": prompt_logprobs,
    "100,000 stop ids": stop_ids,
    "2,000 half-sent requests": half_sent,
    "1 GB to ZeroMQ sockets": zeromq,
    "/health 500 times a second": health,
    "500 requests that are cut": cut,
}


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the launcher")
    args = parser.parse_args(None if arguments is None else list(arguments))
    print(json.dumps(asyncio.run(ATTACKS[args.name](args.port, args.pid))))


if __name__ == "__main__":
    main()
