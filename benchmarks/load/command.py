"""Load generator for any OpenAI endpoint: latencies and throughput of streamed requests.

    manta bench                                 # of a server on 127.0.0.1:8000
    manta bench --base-url http://127.0.0.1:9000 --request-rate 4

Prompts are random token ids by default, so no tokenizer is needed and no prefix cache helps.
Tokens are counted by the server's usage. One process. benchmarks/README.md of the repository
explains the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp

from benchmarks.load.arguments import json_object, key_value, natural, positive, positives
from benchmarks.load.client import analyse, list_models
from benchmarks.load.load import Prompt, Workload, arrival_offsets, make_prompts, run_requests
from benchmarks.load.output import finish, print_table, save_result
from benchmarks.load.report import RunReport, medians, print_reports, summarise

DEFAULT_URL = "http://127.0.0.1:8000"
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WARMUP_SEED = 500_000
T = TypeVar("T")


class OwnServer(Protocol):
    """A server that this process started for the run."""

    base_url: str

    def cpu_seconds(self) -> float:
        """CPU time of all its processes."""


StartServer = Callable[[dict[str, str]], AbstractContextManager[OwnServer]]
"""Starts a server; its argument overrides keys of the server's configuration."""


@dataclass(frozen=True)
class Target:
    """The endpoint under test and how it is asked."""

    base_url: str
    model: str
    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    return_token_ids: bool = False
    timeout_s: float = 600.0
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Further fields of every request."""
    keeps_connections: bool = True
    """Whether a connection is used again. Some servers close an idle one just then."""

    def body(self, prompt: Prompt, output_len: int) -> dict[str, object]:
        """A streaming request for `output_len` tokens; extensions are sent only where in use."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        return {**body, **self.extra_body}


def measure(
    target: Target,
    load: Workload,
    *,
    seed: int,
    warmup: int,
    label: str,
    server: OwnServer | None = None,
) -> RunReport:
    """Run `load` once against `target`, after `warmup` requests of the same kind.

    `seed` fixes prompts and arrivals; warm-up prompts come from another seed. `server` is the
    server under test if this process started it; its CPU time is read. A failed warm-up request
    counts as a failure of the run.
    """
    return asyncio.run(_measure(target, load, seed, warmup, label, server))


async def _measure(
    target: Target,
    load: Workload,
    seed: int,
    warmup: int,
    label: str,
    server: OwnServer | None,
) -> RunReport:
    url = target.base_url + ENDPOINTS[target.endpoint]
    expected_tokens = load.output_len if target.ignore_eos else None
    bodies = [target.body(prompt, load.output_len) for prompt in make_prompts(load, seed)]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not target.keeps_connections),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        headers=_headers(),
    ) as session:
        prompts = make_prompts(replace(load, num_prompts=warmup), seed + WARMUP_SEED)
        warmup_records = await run_requests(
            session,
            url,
            [target.body(prompt, load.output_len) for prompt in prompts],
            [0.0] * warmup,
            load.concurrency,
        )

        load_1min = os.getloadavg()[0]
        client_cpu = time.process_time()
        server_cpu = server.cpu_seconds() if server else None
        offsets = arrival_offsets(load, seed)
        records = await run_requests(session, url, bodies, offsets, load.concurrency)
        client_cpu = time.process_time() - client_cpu
        if server and server_cpu is not None:
            server_cpu = server.cpu_seconds() - server_cpu
    report = summarise(
        [analyse(record, expected_tokens) for record in records],
        [analyse(record, expected_tokens).error for record in warmup_records],
        label=label,
        concurrency=load.concurrency,
        request_rate=None if load.request_rate == float("inf") else load.request_rate,
        duration_s=max(r.ended for r in records) - min(r.sent for r in records),
        client_cpu_s=client_cpu,
        load_1min=load_1min,
    )
    report.server_cpu_s = server_cpu
    return report


def main(argv: list[str] | None = None, start_server: StartServer | None = None) -> int:
    """Measure and print. Exit status 1 if a request failed or there is nothing to measure.

    Without `--base-url`, `start_server` starts the server under test; if there is no
    `start_server` either, the server at 127.0.0.1:8000 is measured.
    """
    args = parse_arguments(sys.argv[1:] if argv is None else argv, start_server is not None)
    try:
        figures, ok = run(args, start_server)
    except (aiohttp.ClientError, OSError, NoModelError) as error:
        where = args.base_url or "the server that was started"
        print(f"error: {where} can't be measured: {error}", file=sys.stderr)
        figures, ok = {"benchmark": "serving", "error": str(error)}, False
    finish(figures, ok)
    if args.save:
        save_result(Path(args.save), figures, ok)
    return 0 if ok else 1


class NoModelError(Exception):
    """The endpoint lists no model."""


def run(
    args: argparse.Namespace, start_server: StartServer | None = None
) -> tuple[dict[str, object], bool]:
    """Run and print everything; return the figures and whether no request failed.

    Raises `aiohttp.ClientError` if the endpoint does not answer.
    """
    starts = start_server is not None and not args.base_url
    with start_server(dict(args.set)) if starts and start_server else nullcontext() as server:
        base_url = server.base_url if server else args.base_url.rstrip("/")
        models = [args.model] if args.model else asyncio.run(list_models(base_url, _headers()))
        if not models:
            raise NoModelError("it lists no model; name one with --model")
        target = described(Target, args, base_url=base_url, model=models[0])
        reports = run_all(args, target, server)
    print_reports(reports)
    groups: dict[str, list[RunReport]] = {}
    for report in reports:
        groups.setdefault(f"concurrency {report.concurrency or 'unlimited'}", []).append(report)
    if args.repeat > 1:
        print()
        print_medians(groups)
    figures: dict[str, object] = {
        "benchmark": "serving",
        "label": args.label,
        "model": target.model,
        "endpoint": target.endpoint,
        "extra_body": target.extra_body,
        "workload": {
            key: value
            for key, value in vars(workload(args, None)).items()
            if key not in ("concurrency", "request_rate")
        },
        "runs": [report.figures() for report in reports],
        "medians": {name: medians(group) for name, group in groups.items()},
    }
    return figures, all(report.failed == 0 for report in reports)


def run_all(args: argparse.Namespace, target: Target, server: OwnServer | None) -> list[RunReport]:
    """Every repeat of every concurrency, repeats outermost; no two runs share a prompt."""
    reports = []
    for repeat in range(args.repeat):
        for index, concurrency in enumerate(args.concurrency):
            load = f"c{concurrency}" if concurrency else f"{args.request_rate:g}/s"
            name = f"{args.label} {load}"
            label = name if args.repeat == 1 else f"{name} #{repeat + 1}"
            print(f"running {label} ...", file=sys.stderr, flush=True)
            report = measure(
                target,
                workload(args, concurrency),
                seed=args.seed * 1_000_000 + repeat * 1_000 + index,
                warmup=args.warmup,
                label=label,
                server=server,
            )
            reports.append(report)
    return reports


def print_medians(groups: dict[str, list[RunReport]]) -> None:
    """Print the medians over repeats, one row for each group."""
    rows = {name: medians(group) for name, group in groups.items()}
    columns = ["output_tok_s", "ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99"]
    print_table(
        ["median of repeats", *columns],
        [[name, *(row.get(column) for column in columns)] for name, row in rows.items()],
    )


def workload(args: argparse.Namespace, concurrency: int | None) -> Workload:
    """The workload that the arguments describe."""
    return described(Workload, args, concurrency=concurrency)


def described(kind: type[T], args: argparse.Namespace, **known: object) -> T:
    """A dataclass, each field of which is known or has an argument of its name."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)} | known)


def parse_arguments(argv: list[str], starts_server: bool = False) -> argparse.Namespace:
    """Parse and check the command line; a wrong combination ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        prog=None if starts_server else "manta bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    if starts_server:
        add("--base-url", help=f"endpoint such as {DEFAULT_URL}; default: start Manta")
        add(
            "--set",
            action="append",
            default=[],
            type=key_value,
            metavar="KEY=VALUE",
            help="override of configs/llama.yaml when Manta is started here (repeatable)",
        )
    else:
        add("--base-url", default=DEFAULT_URL, help=f"endpoint (default {DEFAULT_URL})")
    add("--endpoint", choices=sorted(ENDPOINTS), default="completions")
    add("--model", help="default: the first of /v1/models")
    add("--num-prompts", type=positive, default=64)
    add("--input-len", type=positive, default=256, help="tokens of a prompt after its prefix")
    add("--output-len", type=positive, default=64)
    add("--prefix-len", type=natural, default=0, help="tokens shared by prompts, put before them")
    add("--num-prefixes", type=positive, default=1, help="number of different shared prefixes")
    add(
        "--dataset",
        choices=("random", "stdlib-text"),
        help="random token ids (default), or source text of about the same length (default for "
        "chat, which takes no token ids)",
    )
    add("--min-token-id", type=natural, default=16, help="lowest id of random prompts")
    add("--vocab-size", type=positive, default=2048, help="random prompts use ids below this")
    add(
        "--concurrency",
        type=positives,
        help="requests in flight at most; a list such as 1,32 makes one run of each (default: "
        "1,32, or no limit with --request-rate)",
    )
    add("--request-rate", type=float, default=float("inf"), help="requests offered per second")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the arrivals' gamma distribution: 1 Poisson, < 1 bursts, > 1 steadier",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly --output-len tokens, and count a request with fewer as failed",
    )
    add(
        "--return-token-ids",
        action="store_true",
        help="ask for token ids in chunks (Manta, vLLM): first tokens that are no text yet count",
    )
    add(
        "--new-connections",
        dest="keeps_connections",
        action="store_false",
        help="a connection for each request",
    )
    add("--temperature", type=float, default=0.0)
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of every request, such as '{\"top_p\": 0.9}'",
    )
    add("--seed", type=int, default=0)
    add("--warmup", type=natural, default=8, help="requests before each run that do not count")
    add("--repeat", type=positive, default=1)
    add(
        "--timeout",
        dest="timeout_s",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="for one request",
    )
    add("--label", default="serving", help="name of the runs in tables and JSON")
    add("--save", metavar="FILE", help="write all figures to this JSON file")
    args = parser.parse_args(argv)
    if args.dataset is None:
        args.dataset = "stdlib-text" if args.endpoint == "chat" else "random"
    if args.endpoint == "chat" and args.dataset == "random":
        parser.error("--dataset random sends token ids, which chat does not take: use stdlib-text")
    if args.min_token_id >= args.vocab_size:
        parser.error(f"--min-token-id must be below --vocab-size ({args.vocab_size})")
    if args.request_rate <= 0 or args.burstiness <= 0:
        parser.error("--request-rate and --burstiness must be greater than 0")
    if starts_server and args.base_url and args.set:
        parser.error("--set configures a server started here, so it cannot go with --base-url")
    if args.concurrency is None:
        args.concurrency = [1, 32] if args.request_rate == float("inf") else [None]
    return args


def _headers() -> dict[str, str]:
    """Authorization from OPENAI_API_KEY where it is set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
