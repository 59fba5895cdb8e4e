"""What interactive requests notice of a saturating flex load, and what it gets of the machine.

A scheduler with overlap over the simulated device, in virtual time: nothing sleeps, so the figures
are the same on any machine, whatever else runs on it.

    python benchmarks/flex.py                   # under four minutes
    python benchmarks/flex.py --rate 4 8        # interactive requests per second
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import finish, print_table
from engine.config import EngineConfig, SimulatedDevice
from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig

DEVICE = SimulatedDevice(step_ms=8.0, token_us=20.0, context_ns=20.0)
"""About Llama-3.1-8B on one H100: a decode of few rows takes 8 ms, 512 tokens take 18 ms."""
KV_TOKENS = 400_000
OUTSTANDING = 400
"""Flex requests that wait or run at any time."""
WARM_UP_S = 10.0
MOST_TTFT, MOST_GAP, LEAST_SHARE = 1.1, 1.2, 0.9


class Load(NamedTuple):
    """`rate` interactive requests per second, in random intervals, and flex ones or none."""

    rate: float
    has_flex: bool
    seconds: float


@dataclass
class Measured:
    """Of the time behind the warm-up. `ttft_s` and `gap_s` are those of interactive requests."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    """Prompt tokens that came to their end, and output tokens: interactive, flex."""
    busy_s: float = 0.0
    retractions: int = 0
    cached: list[int] = field(default_factory=lambda: [0, 0])


class _InFlight(NamedTuple):
    result: GenerationBatchResult
    ready_at: float


class Simulation:
    """One load on one engine, in virtual seconds."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.scheduler = Scheduler(config())
        self.rng = np.random.default_rng(7)
        """The arrivals are the same with and without flex requests."""
        self.flex_rng = np.random.default_rng(8)
        self.measured = Measured()
        self.now = self.free_at = 0.0
        self.in_flight: deque[_InFlight] = deque()
        self.sent_at: dict[int, float] = {}
        self.last_at: dict[int, float] = {}
        self.prompt_len: dict[int, int] = {}
        self.num_flex = 0
        self.next_rid = 0

    def run(self) -> Measured:
        """Until the load's end; what is under way then doesn't count."""
        arrivals = [self._interval()] if self.load.rate else []
        while self.now < self.load.seconds:
            while arrivals and arrivals[0] <= self.now:
                at = heapq.heappop(arrivals)
                self._add(False, at)
                heapq.heappush(arrivals, at + self._interval())
            while self.load.has_flex and self.num_flex < OUTSTANDING:
                self._add(True, self.now)
            while (batch := self.scheduler.next_batch(self.now)) is not None:
                self._launch(batch)
            events = [self.in_flight[0].ready_at] if self.in_flight else []
            if self.scheduler.launch_at is not None:
                events.append(self.scheduler.launch_at)
            self.now = max(self.now, min([*events, *arrivals[:1], self.load.seconds]))
            if self.in_flight and self.in_flight[0].ready_at <= self.now:
                self.scheduler.process_result(self.in_flight.popleft().result)
                self._read()
        self.measured.retractions = self.scheduler.stats.flex_retractions_total
        return self.measured

    @property
    def _counts(self) -> bool:
        return self.now >= WARM_UP_S

    def _interval(self) -> float:
        return float(self.rng.exponential(1 / self.load.rate))

    def _add(self, is_flex: bool, at: float) -> None:
        rng = self.flex_rng if is_flex else self.rng
        num_prompt, num_output = int(rng.integers(100, 900)), int(rng.integers(50, 350))
        rid = self.next_rid * 2 + is_flex
        self.next_rid += 1
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        ids = rng.integers(10, 4000, num_prompt).astype(np.int32)
        sequence = TokenSequence(ids, params, is_flex=is_flex)
        self.scheduler.add(AddRequest(rid=rid, reply_to="", sequence=sequence), self.now)
        self.sent_at[rid], self.prompt_len[rid] = at, num_prompt
        self.num_flex += is_flex

    def _launch(self, batch: ModelWorkerBatch) -> None:
        seconds = DEVICE.seconds(int(batch.query_lens.sum()), int(batch.seq_lens.sum()))
        self.free_at = max(self.now, self.free_at) + seconds
        if self._counts:
            self.measured.busy_s += seconds
        tokens = [11] * int((batch.num_sampled > 0).sum())
        result = GenerationBatchResult(batch.step, tokens, device_s=seconds)
        self.in_flight.append(_InFlight(result, self.free_at))

    def _read(self) -> None:
        found = self.measured
        for _, out in self.scheduler.take_outputs():
            for rid in out.rids:
                is_flex, is_first = bool(rid % 2), rid not in self.last_at
                since = self.sent_at[rid] if is_first else self.last_at[rid]
                self.last_at[rid] = self.now
                if not self._counts:
                    continue
                found.tokens[is_flex] += 1 + (self.prompt_len[rid] if is_first else 0)
                if not is_flex:
                    (found.ttft_s if is_first else found.gap_s).append(self.now - since)
            self.num_flex -= sum(end.rid % 2 for end in out.finished)


def config() -> SchedulerConfig:
    """Of an engine with default sizes."""
    engine = EngineConfig(
        device="simulated",
        simulated=DEVICE,
        max_total_tokens=KV_TOKENS,
        enable_dynamic_chunking=False,
    )
    return SchedulerConfig(engine.resolve(), KV_TOKENS)


def compare(rate: float, seconds: float) -> dict[str, float]:
    """The figures of one rate."""
    without = Simulation(Load(rate, False, seconds)).run()
    beside = Simulation(Load(rate, True, seconds)).run()
    alone = Simulation(Load(0.0, True, seconds)).run()
    span = seconds - WARM_UP_S
    left = alone.tokens[True] - beside.tokens[False]
    return {
        "rate": rate,
        "busy_without": without.busy_s / span,
        "ttft_without_ms": 1e3 * float(np.quantile(without.ttft_s, 0.99)),
        "ttft_ratio": float(np.quantile(beside.ttft_s, 0.99) / np.quantile(without.ttft_s, 0.99)),
        "gap_without_ms": 1e3 * float(np.quantile(without.gap_s, 0.99)),
        "gap_ratio": float(np.quantile(beside.gap_s, 0.99) / np.quantile(without.gap_s, 0.99)),
        "mean_gap_ratio": float(np.mean(beside.gap_s) / np.mean(without.gap_s)),
        "flex_tokens_per_s": beside.tokens[True] / span,
        "flex_share": beside.tokens[True] / left,
        "flex_retractions": float(beside.retractions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rate", type=float, nargs="+", default=[2.0, 8.0, 16.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual ones")
    args = parser.parse_args()
    rows = [compare(rate, args.seconds) for rate in args.rate]
    names = list(rows[0])
    print_table(names, [[row[name] for name in names] for row in rows])
    ok = all(
        row["ttft_ratio"] <= MOST_TTFT
        and row["gap_ratio"] <= MOST_GAP
        and row["flex_share"] >= LEAST_SHARE
        for row in rows
    )
    finish({"rows": rows}, ok)


if __name__ == "__main__":
    main()
