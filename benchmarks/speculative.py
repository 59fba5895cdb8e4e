"""What speculative decoding gains and costs.

    python benchmarks/speculative.py            # all parts, some minutes
    python benchmarks/speculative.py --save     # also results/speculative.json

drafting   microseconds that the n-gram drafter takes for a row and step, 1 k and 32 k tokens behind
simulated  a device with steps of 10 ms, 64 rows, acceptance 0.7, through actors and messages: the
           share of the time that it is busy
scheduler  CPU time of the scheduler per token, 256 rows: ordinary steps, and steps with drafts
bfloat16   greedy outputs of 32 that change with the batch, and with drafts
http       two servers at a time, one of which speculates. The same requests go to both in turns;
           every prompt was sent before, so that prefill counts for little. Greedy outputs must be
           equal. "tokens/step" is the server's own count: output tokens for each row and step.

Prompts of `http` for the carried model: `editing` is a piece of Python's library, and its first
lines once more; `extraction` is such a piece and some lines from the middle of it; `plain` is its
beginning. Those for the 88 M model, whose weights make it copy: `copying_prompts`. `random` are
random token ids, sampled at temperature 1. `1 tokens` and `2 tokens` are random ids too, and a bias
leaves so many tokens for the output. `prediction` is a chat whose prediction is the reply itself,
of the 88 M model one word again and again.
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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result
from benchmarks.peers import models
from benchmarks.servers import ManagedServer, exit_on_sigterm, manta_server
from benchmarks.speculative_parts import CARRIED, bfloat16, drafting, scheduler, simulated
from engine.tokenizer.tokenizer import Tokenizer

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "speculative.json"
GAIN_OF_TOKENS = 0.8
PREDICTION_NEEDED = 4.0
NOTHING_LOST = 0.97
OUTPUT_LEN = 256
"""Tokens of most outputs, and of the passages of prompts that they repeat."""
_NUMBERS = ("shipping_address_number", "invoice_address_number", "number_of_items_ordered")
SCHEMAS: dict[str, dict[str, Any]] = {
    "schema, numbers": {
        "type": "array",
        "items": {"type": "integer", "maximum": 99},
        "minItems": 20,
        "maxItems": 20,
    },
    "schema, names": {
        "type": "object",
        "properties": {name: {"type": "integer", "maximum": 99} for name in _NUMBERS},
        "required": list(_NUMBERS),
        "additionalProperties": False,
    },
}
"""One that leaves choices everywhere, and one that forces long names."""
MODULES = ("bisect", "heapq", "shlex", "csv")


# Servers


COMPLETIONS = "/v1/completions"


class Load(NamedTuple):
    """Requests that are alike. `bodies` go to `path`."""

    name: str
    path: str
    bodies: list[dict[str, Any]]
    concurrency: int


class Answer(NamedTuple):
    text: str
    num_tokens: int


def prompts(tokenizer: Tokenizer, modules: Sequence[str]) -> dict[str, list[list[int]]]:
    """Token ids by kind, of pieces of modules."""
    pieces = []
    for name in modules:
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


def copying_prompts(count: int) -> dict[str, list[list[int]]]:
    """Token ids by kind, for the model that goes on with any passage as `successors` says.

    `editing`: a passage in which every 12th token is wrong, and its first 8 tokens; the output is
    the passage without the faults. `extraction`: three passages, and the first 4 tokens of one of
    them; the output is the passage. `plain`: a passage; the output is what comes after it.
    """
    behind = models.successors(models.SHAPES[models.COPYING]["vocab_size"])
    rng = np.random.default_rng(1)

    def passage(length: int) -> list[int]:
        found = [int(rng.integers(2, len(behind)))]
        while len(found) < length:
            found.append(behind[found[-1]])
        return found

    kinds: dict[str, list[list[int]]] = {"editing": [], "extraction": [], "plain": []}
    for _ in range(count):
        right = passage(OUTPUT_LEN + 8)
        wrong = list(right)
        for place in range(11, len(wrong), 12):
            wrong[place] = int(rng.integers(2, len(behind)))
        kinds["editing"].append(wrong + right[:8])
        passages = [passage(OUTPUT_LEN + 4) for _ in range(3)]
        kinds["extraction"].append([*chain(*passages), *passages[1][:4]])
        kinds["plain"].append(passage(128))
    return kinds


def model_folder(name: str) -> Path:
    """The carried model, or one of `benchmarks.peers.models`."""
    return CARRIED if name == CARRIED.name else models.build(name, PEERS / "models" / name)


def prompts_of(model: Path, modules: Sequence[str]) -> dict[str, list[list[int]]]:
    """Prompts by kind whose outputs repeat parts of them, as many of each as there are modules."""
    if model == CARRIED:
        return prompts(Tokenizer.from_pretrained(model), modules)
    return copying_prompts(len(modules))


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
    texts = prompts_of(model, MODULES)
    rng = np.random.default_rng(0)
    randoms = rng.integers(10, 2000, (32, 128)).tolist()
    base = {"model": str(model), "max_total_tokens": 65536, "max_model_len": 2048}
    rows: list[dict[str, Any]] = []
    rounds = args.rounds

    def config(count: int) -> str:
        return f"{{method: ngram, num_speculative_tokens: {count}}}"

    with ExitStack() as stack:
        plain = stack.enter_context(manta_server(base))
        drafts = stack.enter_context(manta_server({**base, "speculative_config": config(4)}))
        for kind in ("editing", "extraction", "plain"):
            load = Load(kind, COMPLETIONS, completions(texts[kind], OUTPUT_LEN), 1)
            row = compare(plain, drafts, load, rounds)
            repeats = kind != "plain"
            row["needed"] = GAIN_OF_TOKENS * row["tokens_per_step"] if repeats else None
            rows.append(row)
        for count in (1, 2):
            bias = {str(100 + i): 100 for i in range(count)}
            bodies = completions(randoms[:4], 128, logit_bias=bias)
            row = compare(plain, drafts, Load(f"{count} tokens", COMPLETIONS, bodies, 1), rounds)
            rows.append({**row, "needed": None})
        sampled = completions(randoms, OUTPUT_LEN, temperature=1.0, seed=1)
        load = Load("random", COMPLETIONS, sampled, 32)
        rows.append({**compare(plain, drafts, load, rounds), "needed": NOTHING_LOST})
        for name, schema in SCHEMAS.items():
            constrained = completions(texts["plain"], 128, structured_outputs={"json": schema})
            load = Load(name, COMPLETIONS, constrained, 1)
            rows.append({**compare(plain, drafts, load, rounds), "needed": None})
    with ExitStack() as stack:
        plain = stack.enter_context(manta_server(base))
        drafts = stack.enter_context(manta_server({**base, "speculative_config": config(8)}))
        bodies = []
        for name in MODULES:
            messages = [{"role": "user", "content": f"What does the module {name} do?"}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": 256, "min_tokens": 256}
            body["temperature"] = 0
            if model != CARRIED:
                # The tokens that this model copies are no text that gives them back.
                body["logit_bias"] = {str(_only(tokenizer.encode("self"))): 100}
            load = Load("", "/v1/chat/completions", [body], 1)
            reply = asyncio.run(send(plain.base_url, load))[1][0].text
            bodies.append({**body, "prediction": {"type": "content", "content": reply}})
        load = Load("prediction", "/v1/chat/completions", bodies, 1)
        rows.append({**compare(plain, drafts, load, rounds), "needed": PREDICTION_NEEDED})
    for row in rows:
        row["model"] = model.name
        row["ok"] = row["needed"] is None or row["speed_up"] >= row["needed"]
    return rows


def main() -> int:
    """Exit status: 1 if a threshold does not hold."""
    parts = ("drafting", "simulated", "scheduler", "bfloat16", "http")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(parts), help="some of " + ",".join(parts))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each load")
    parser.add_argument("--steps", type=int, default=300, help="of the simulated device")
    parser.add_argument("--models", default=f"{CARRIED.name},{models.COPYING}")
    parser.add_argument("--save", action="store_true", help=f"write {SAVE_TO.name}")
    args = parser.parse_args()
    exit_on_sigterm()
    figures: dict[str, Any] = {"benchmark": "speculative"}
    for part in args.parts.split(","):
        if part == "http":
            found: list[dict[str, Any]] = []
            for name in args.models.split(","):
                found += http(model_folder(name), args)
            columns = ("model", "load", "concurrency", "speed_up", "tokens_per_step", "acceptance")
        else:
            found = {
                "drafting": drafting,
                "simulated": partial(simulated, args.steps),
                "scheduler": scheduler,
                "bfloat16": bfloat16,
            }[part]()
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


def _only(ids: Sequence[int]) -> int:
    (token,) = ids
    return token


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
