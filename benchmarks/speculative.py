"""What speculative decoding gains and costs.

    python benchmarks/speculative.py            # all parts, some minutes
    python benchmarks/speculative.py --save     # also results/speculative.json

drafting   microseconds that the n-gram drafter takes for a row and step, 1 k and 32 k tokens behind
simulated  a device with steps of 10 ms, 64 rows, acceptance 0.7, through actors and messages: the
           share of the time that it is busy
scheduler  CPU time of the scheduler per token, 256 rows: ordinary steps, and steps with drafts
http       two servers at a time, one of which speculates. The same requests go to both in turns;
           every prompt was sent before, so that prefill counts for little. Greedy outputs must be
           equal. "tokens/step" is the server's own count: output tokens for each row and step.

Prompts of `http`: `editing` is a piece of Python's library, and its first lines once more;
`extraction` is such a piece and some lines from the middle of it; `plain` is its beginning;
`random` are random token ids, sampled at temperature 1. `prediction` is a chat whose prediction is
the reply itself.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import statistics
import sys
import time
import types
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result
from benchmarks.engine_driver import Arrivals, EngineDriver
from benchmarks.peers import models
from benchmarks.servers import ManagedServer, exit_on_sigterm, manta_server
from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.executor.base import Executor
from engine.protocol.messages import (
    AddRequest,
    GenerationBatchResult,
    ModelWorkerBatch,
    SampleMasks,
    SlotParams,
    VerifiedRows,
)
from engine.sampling_params import SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.speculative.config import SpeculativeConfig
from engine.speculative.ngram import NgramDrafter
from engine.tokenizer.tokenizer import Tokenizer

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "speculative.json"
CARRIED = REPO_ROOT / "models" / "manta-small"
DRAFTING_LIMIT_US = 10.0
BUSY_NEEDED = {"device": 0.95, "host": 0.90}
GAIN_OF_TOKENS = 0.8
PREDICTION_NEEDED = 4.0
NOTHING_LOST = 0.97
ROWS = 256
MODULES = ("bisect", "heapq", "shlex", "csv")


# Drafting


def drafting() -> list[dict[str, Any]]:
    """Time of one draft of 4 tokens, the index included."""
    rows = []
    rng = np.random.default_rng(0)
    for context in (1024, 32768):
        # A vocabulary this small makes every n-gram occur before: the dearest look-ups.
        for vocab, kind in ((60, "repeats"), (100_000, "new")):
            drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
            tokens = rng.integers(0, vocab, context).astype(np.int32)
            drafter.install(SlotParams(1, context, [], SamplingParams(), tokens))
            more = rng.integers(0, vocab, 4000).tolist()
            began = time.perf_counter()
            for token in more:
                drafter.propose([1], [4])
                drafter.observe(1, [token])
            micros = (time.perf_counter() - began) / len(more) * 1e6
            ok = micros <= DRAFTING_LIMIT_US
            rows.append({"context": context, "tokens": kind, "us_per_row": micros, "ok": ok})
    return rows


# A simulated device


def simulated(steps: int) -> list[dict[str, Any]]:
    """How busy the device is kept."""
    rows = []
    for where, needed in BUSY_NEEDED.items():
        config = {
            "device": "simulated",
            "simulated": {"step_ms": 10.0, "draft_acceptance": 0.7, "drafts_on": where},
            "speculative_config": {"method": "ngram", "draft_length": "fixed"},
            "max_running_requests": 64,
        }
        with EngineDriver(**config) as driver:
            rng = np.random.default_rng(0)
            prompts = [rng.integers(10, 4000, 32).astype(np.int32) for _ in range(64)]
            params = SamplingParams(max_tokens=steps * 2, temperature=0.0, ignore_eos=True)
            driver.add(prompts, [params] * 64)
            driver.collect(Arrivals(), 64)
            stats = driver.stats()
            spans = [span for role in driver.trace(8192) for span in role.stages]
        spans = spans[5 : len(spans) * 3 // 4]  # all rows run
        busy = sum(span.ended_at - span.started_at for span in spans)
        share = busy / (spans[-1].ended_at - spans[0].started_at)
        rows.append(
            {
                "drafts_on": where,
                "busy": share,
                "accepted": stats.spec_decode_accepted_tokens_total
                / max(1, stats.spec_decode_draft_tokens_total),
                "ok": share >= needed,
            }
        )
    return rows


# The scheduler


class InstantExecutor(Executor):
    """Answers at once; where rows have drafts, each gives `given` tokens."""

    def __init__(self, num_kv_tokens: int, given: int) -> None:
        self.num_kv_tokens = num_kv_tokens
        self.given = given
        self._results: list[GenerationBatchResult] = []
        self._verified: VerifiedRows | None = None
        self._tokens: list[int] = []

    def launch(self, batch: ModelWorkerBatch) -> None:
        rows = len(batch.sample_rows)
        if batch.verify is None:
            self._results.append(GenerationBatchResult(batch.step, [7] * rows))
            return
        if self._verified is None or len(self._verified.num_tokens) != rows:
            prompts = rows - len(batch.verify.num_drafts)
            drafts = [0] * prompts + batch.verify.num_drafts.tolist()
            counts = [min(self.given, 1 + count) for count in drafts]
            self._verified, self._tokens = VerifiedRows(counts, drafts), [7] * sum(counts)
        result = GenerationBatchResult(batch.step, self._tokens)
        result.verified = self._verified
        self._results.append(result)

    def sample(self, masks: SampleMasks) -> None:
        raise NotImplementedError

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        return self._results.pop(0)

    def shutdown(self) -> None:
        pass


def scheduler() -> list[dict[str, Any]]:
    """CPU time per token of composing, processing and output messages."""
    rows = []
    for given in (0, 3):
        prompts_of_rows = np.random.default_rng(0).integers(10, 4000, (ROWS, 256))
        config: dict[str, Any] = {"speculative_config": {"method": "ngram"}} if given else {}
        engine = EngineConfig(
            model=str(CARRIED),
            max_total_tokens=400_000,
            max_model_len=1000,
            chunked_prefill_size=ROWS * 256,
            **config,
        )
        if engine.speculative_config is not None:
            engine.speculative_config.draft_length = "fixed"
        core = EngineCore(
            Scheduler(SchedulerConfig.from_config(engine.resolve(), 400_000)),
            InstantExecutor(400_000, given),
        )
        for rid, prompt in enumerate(prompts_of_rows.astype(np.int32)):
            params = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
            core.scheduler.add(AddRequest(rid=rid, input_ids=prompt, params=params), 0.0)
        while core.scheduler.requests.waiting or core.scheduler.requests.chunked:
            core.step()
        for _ in range(10):
            core.step()
        times, tokens = [], 0
        for _ in range(100):
            began = time.thread_time()
            outputs = core.step()
            times.append(time.thread_time() - began)
            tokens += sum(len(out.token_ids) for _, out in outputs)
        rows.append(
            {
                "steps": "with drafts" if given else "ordinary",
                "us_per_step": statistics.median(times) * 1e6,
                "us_per_token": statistics.median(times) * 1e6 * len(times) / tokens,
            }
        )
    rows[1]["ok"] = rows[1]["us_per_token"] <= rows[0]["us_per_token"]
    return rows


# Servers


class Load(NamedTuple):
    """Requests that are alike. `bodies` go to `path`."""

    name: str
    path: str
    bodies: list[dict[str, Any]]
    concurrency: int


class Answer(NamedTuple):
    text: str
    num_tokens: int


def prompts(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Token ids by kind."""
    pieces = []
    for name in MODULES:
        module = __import__(name)
        assert isinstance(module, types.ModuleType)
        lines = inspect.getsource(module).splitlines(keepends=True)
        pieces.append(lines[20:60])
    texts = {
        "editing": ["".join(p) + "\n\n# The same again:\n" + "".join(p[:3]) for p in pieces],
        "extraction": ["".join(p) + "\n\n\n" + "".join(p[10:13]) for p in pieces],
        "plain": ["".join(p[:12]) for p in pieces],
    }
    return {kind: [tokenizer.encode(text)[:700] for text in found] for kind, found in texts.items()}


def completions(ids: Sequence[list[int]], max_tokens: int, **more: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    return [{**body, "prompt": prompt} for prompt in ids]


async def send(url: str, load: Load) -> tuple[float, list[Answer]]:
    """Seconds and answers of all requests of a load."""
    limit = asyncio.Semaphore(load.concurrency)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:

        async def one(body: dict[str, Any]) -> Answer:
            async with limit, session.post(url + load.path, json=body) as reply:
                found = await reply.json()
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {found}")
            choice = found["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            return Answer(text, found["usage"]["completion_tokens"])

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, load.bodies))
        return time.perf_counter() - began, list(answers)


def counters(server: ManagedServer) -> dict[str, float]:
    """What the server's engine has counted."""

    async def read() -> str:
        url = server.base_url + "/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return await reply.text()

    found: dict[str, float] = {}
    for line in asyncio.run(read()).splitlines():
        if line.startswith("manta_engine_") and "position=" not in line:
            name, _, value = line.partition("{")[0], None, line.rsplit(" ", 1)[1]
            found[name] = float(value)
    return found


def compare(plain: ManagedServer, drafts: ManagedServer, load: Load, rounds: int) -> dict[str, Any]:
    """The load on both servers in turns."""
    for server in (plain, drafts):
        asyncio.run(send(server.base_url, load))
    ratios, speeds = [], []
    before = counters(drafts)
    for turn in range(rounds):
        seconds: dict[int, float] = {}
        texts: dict[int, list[str]] = {}
        for server in (plain, drafts) if turn % 2 == 0 else (drafts, plain):
            seconds[server.port], answers = asyncio.run(send(server.base_url, load))
            texts[server.port] = [answer.text for answer in answers]
        tokens = sum(answer.num_tokens for answer in answers)
        if texts[plain.port] != texts[drafts.port]:
            raise RuntimeError(f"{load.name}: the outputs differ")
        ratios.append(seconds[plain.port] / seconds[drafts.port])
        speeds.append(tokens / seconds[drafts.port])
    after = counters(drafts)

    def grown(name: str) -> float:
        return after[name] - before[name]

    generated = grown("manta_engine_generation_tokens_total")
    accepted = grown("manta_engine_spec_decode_accepted_tokens_total")
    drafted = grown("manta_engine_spec_decode_draft_tokens_total")
    row = {
        "load": load.name,
        "concurrency": load.concurrency,
        "speed_up": statistics.median(ratios),
        "speed_ups": ratios,
        "tokens_s": statistics.median(speeds),
        "tokens_per_step": generated / max(generated - accepted, 1.0),
        "acceptance": accepted / max(drafted, 1.0),
    }
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in row.items() if key != "speed_ups")
    print(shown, file=sys.stderr, flush=True)
    return row


def http(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All loads on one model."""
    tokenizer = Tokenizer.from_pretrained(model)
    texts = prompts(tokenizer)
    rng = np.random.default_rng(0)
    randoms = rng.integers(10, 2000, (32, 128)).tolist()
    base = {"model": str(model), "max_total_tokens": 65536, "max_model_len": 2048}
    rows: list[dict[str, Any]] = []

    def config(count: int) -> str:
        return f"{{method: ngram, num_speculative_tokens: {count}}}"

    with ExitStack() as stack:
        plain = stack.enter_context(manta_server(base))
        drafts = stack.enter_context(manta_server({**base, "speculative_config": config(4)}))
        for kind in ("editing", "extraction", "plain"):
            load = Load(kind, "/v1/completions", completions(texts[kind], 96), 1)
            row = compare(plain, drafts, load, args.rounds)
            row["needed"] = None if kind == "plain" else GAIN_OF_TOKENS * row["tokens_per_step"]
            rows.append(row)
        sampled = completions(randoms, 64, temperature=1.0, seed=1)
        load = Load("random", "/v1/completions", sampled, 32)
        rows.append({**compare(plain, drafts, load, args.rounds), "needed": NOTHING_LOST})
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20}
        constrained = completions(texts["plain"], 96, structured_outputs={"json": schema})
        load = Load("JSON schema", "/v1/completions", constrained, 1)
        rows.append({**compare(plain, drafts, load, args.rounds), "needed": None})
    with ExitStack() as stack:
        plain = stack.enter_context(manta_server(base))
        drafts = stack.enter_context(manta_server({**base, "speculative_config": config(8)}))
        bodies = []
        for name in MODULES:
            messages = [{"role": "user", "content": f"What does the module {name} do?"}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": 256, "min_tokens": 256}
            body["temperature"] = 0
            load = Load("", "/v1/chat/completions", [body], 1)
            reply = asyncio.run(send(plain.base_url, load))[1][0].text
            bodies.append({**body, "prediction": {"type": "content", "content": reply}})
        load = Load("prediction", "/v1/chat/completions", bodies, 1)
        needed = PREDICTION_NEEDED if model == CARRIED else None
        rows.append({**compare(plain, drafts, load, args.rounds), "needed": needed})
    for row in rows:
        row["model"] = model.name
        row["ok"] = row["needed"] is None or row["speed_up"] >= row["needed"]
    return rows


def main() -> int:
    """Exit status: 1 if a threshold does not hold."""
    parts = ("drafting", "simulated", "scheduler", "http")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(parts), help="some of " + ",".join(parts))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each load")
    parser.add_argument("--steps", type=int, default=300, help="of the simulated device")
    parser.add_argument("--models", default="manta-small,llama-88m")
    parser.add_argument("--save", action="store_true", help=f"write {SAVE_TO.name}")
    args = parser.parse_args()
    exit_on_sigterm()
    figures: dict[str, Any] = {"benchmark": "speculative"}
    for part in args.parts.split(","):
        if part == "http":
            found: list[dict[str, Any]] = []
            for name in args.models.split(","):
                model = CARRIED
                if name != CARRIED.name:
                    model = models.build(name, PEERS / "models" / name)
                found += http(model, args)
            columns = ("model", "load", "concurrency", "speed_up", "tokens_per_step", "acceptance")
        else:
            found = {"drafting": drafting, "scheduler": scheduler}.get(
                part, lambda: simulated(args.steps)
            )()
            columns = tuple(found[0])
        figures[part] = found
        print_table(
            list(columns),
            [[_shown(row.get(column, "")) for column in columns] for row in found],
        )
        print(flush=True)
    ok = all(row.get("ok", True) for part in args.parts.split(",") for row in figures[part])
    if args.save:
        save_result(SAVE_TO, figures, ok)
    finish(figures, ok)
    return 0 if ok else 1


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
