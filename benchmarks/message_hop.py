"""Time of one message from one process to another, by datagram and by ZeroMQ.

A process sends small messages to an `Inbox` of another process at the pace of steps (20 ms, so that
the receiver has gone to sleep). The receiver notes how long each took by the system's monotonic
clock. The lanes take turns for several rounds. Roles of one node use "datagrams", roles of
different nodes "ZeroMQ" (here both are on one node).

ok: every message came, in order.

    python benchmarks/message_hop.py [--save [FILE]]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, percentiles, print_table, save_result
from benchmarks.load.arguments import positive
from engine.protocol import local_socket
from engine.protocol.step import GenerationBatchResult
from engine.protocol.transport import Inbox, Outbox

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "message-hop.json"
LANES = ("datagrams", "ZeroMQ")
ROWS = 48


def receive(parent: Connection, lane: str, count: int) -> None:
    """Tell the parent an address, then the delays of `count` messages in us, and the steps."""
    if lane == "ZeroMQ":
        local_socket.bind = lambda secret: None
    inbox = Inbox()
    parent.send(inbox.address)
    delays, steps = [], []
    for _ in range(count):
        message = inbox.recv(10.0)
        if message is None:
            break
        delays.append((time.monotonic() - message.device_s) * 1e6)
        steps.append(message.step)
    parent.send((delays, steps))
    inbox.close()


def measure(lane: str, count: int, pause_s: float) -> tuple[list[float], bool]:
    """Delays of `count` messages in us, and whether all came in order."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=receive, args=(there, lane, count)
    )
    process.start()
    outbox = Outbox(here.recv())
    time.sleep(0.5)  # ZeroMQ connects in the background
    tokens = list(range(ROWS))
    for step in range(count):
        time.sleep(pause_s)
        outbox.send(GenerationBatchResult(step, tokens, device_s=time.monotonic()))
    delays, steps = here.recv()
    process.join()
    outbox.close()
    return delays, steps == list(range(count))


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=positive, default=300, help="per lane and round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--save", nargs="?", type=Path, const=SAVE_TO)
    args = parser.parse_args()
    delays: dict[str, list[float]] = {lane: [] for lane in LANES}
    ok = True
    for _ in range(args.rounds):
        for lane in LANES:
            some, in_order = measure(lane, args.messages, args.step_ms / 1e3)
            delays[lane] += some
            ok = ok and in_order
    hop_us = {lane: percentiles(delays[lane], (1, 50, 99)) for lane in LANES}
    figures: dict[str, object] = {
        "benchmark": "message_hop",
        "messages": args.messages,
        "rounds": args.rounds,
        "step_ms": args.step_ms,
        "hop_us": hop_us,
    }
    rows: list[list[object]] = [[lane, *hop_us[lane].values()] for lane in LANES]
    print_table(["one message, us", *hop_us[LANES[0]]], rows)
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
