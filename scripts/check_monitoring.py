"""Checks dashboard, alert rules and counters with a real Prometheus and a real server.

    python scripts/check_monitoring.py --prometheus /usr/bin/prometheus

`promtool` must lie beside `prometheus`. The alert rules are checked and tested. Then a server with
two ingresses and keys runs under load while Prometheus scrapes it every second. Every query of the
dashboard must return data, and so must queries for each of vLLM's names. The counters must equal
what the client counted. It prints a table; the exit status is 0 if all is well. It takes about a
minute and needs no network.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT
from benchmarks.servers import ManagedServer, free_port
from deploy.http.metrics.vllm_names import HISTOGRAMS

MONITORING = REPO_ROOT / "k8s/monitoring"
SCRAPE_S = 1.0
ROUNDS = 10
PER_ROUND = 8
WINDOW = "2m"
"""For rates: it holds the whole load."""
SETTLE_S = 30.0
MODEL = "checked"
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
VLLM_COUNTERS = (
    *("num_preemptions_total", "prompt_tokens_total", "prompt_tokens_cached_total"),
    *("generation_tokens_total", "request_success_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "iteration_tokens_total_count"),
)


class Result(NamedTuple):
    """One line of the table. `wrong`: what is wrong, "" if nothing is."""

    what: str
    value: str
    wrong: str = ""


@dataclass
class Keys:
    """A keys file with a key for the load and one for scrapes."""

    path: Path
    user: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    admin: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def write(self) -> None:
        entries = [
            {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "role": role}
            for name, text, role in (("load", self.user, "user"), ("scrape", self.admin, "admin"))
        ]
        self.path.write_text(yaml.safe_dump({"keys": entries}))


@dataclass
class Counted:
    """What the client saw."""

    requests: Counter[int] = field(default_factory=Counter)
    """By HTTP status, of the endpoint for completions."""
    sequences: int = 0
    prompt: int = 0
    """Tokens; each copy of a prompt counts."""
    generated: int = 0
    unauthorized: int = 0


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query. Raises `RuntimeError` if it isn't answered."""
        reply = httpx.post(f"{self._url}/api/v1/query", data={"query": expression}, timeout=30)
        body = reply.json()
        if body["status"] != "success":
            raise RuntimeError(f"{expression}: {body['error']}")
        return [(entry["metric"], float(entry["value"][1])) for entry in body["data"]["result"]]

    def total(self, expression: str) -> float:
        """The sum of what a query returns; NaN if that is nothing."""
        found = [value for _, value in self.query(expression)]
        return sum(found) if found else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prometheus", required=True, type=Path, help="path of the program")
    parser.add_argument("--config", default="configs/llama.yaml", help="what is served")
    options = parser.parse_args()
    binary: Path = options.prometheus.resolve()
    results = list(check_rules(binary.with_name("promtool")))
    with tempfile.TemporaryDirectory(prefix="manta-monitoring-") as folder:
        keys = Keys(Path(folder) / "keys.yaml")
        keys.write()
        with (
            server(options.config, keys) as manta,
            prometheus(binary, Path(folder), manta, keys) as p,
        ):
            counted = asyncio.run(load(manta.base_url, keys))
            results += settle(p, counted)
            results += check_queries(p)
    width = max(len(result.what) for result in results)
    for result in results:
        note = f"  <- {result.wrong}" if result.wrong else ""
        print(f"{result.what:<{width}}  {result.value}{note}")
    wrong = [result for result in results if result.wrong]
    print(f"{len(results)} checks, {len(wrong)} failed")
    return 1 if wrong else 0


def check_rules(promtool: Path) -> Iterator[Result]:
    """The alert rules are valid, and their tests pass."""
    for command in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        done = subprocess.run(
            [promtool, *command], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        said = (done.stdout + done.stderr).strip()
        last = said.splitlines()[-1].strip() if said else ""
        yield Result(f"promtool {' '.join(command)}", last, said if done.returncode else "")


def server(config: str, keys: Keys) -> ManagedServer:
    """Two ingresses, vLLM's names."""
    settings = {
        "ingress_replicas": 2,
        "metrics_names": "vllm",
        "served_model_name": MODEL,
        "api_keys_file": str(keys.path),
    }
    port = free_port()
    command = [sys.executable, "-m", "deploy.launch", config, "--port", str(port), "--verbose"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return ManagedServer(command, None, port, timeout_s=300.0)


@contextmanager
def prometheus(
    binary: Path, folder: Path, manta: ManagedServer, keys: Keys
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the server."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "evaluation_interval": f"{SCRAPE_S:g}s"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [
            {
                "job_name": "manta",
                "authorization": {"credentials": keys.admin},
                "static_configs": [{"targets": [f"127.0.0.1:{manta.port}"]}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        str(binary),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with ManagedServer(command, None, port, ready_path="/-/ready", timeout_s=60.0) as running:
        found = Prometheus(running.base_url)
        # Counters that are 0 before the load make rates possible.
        deadline = time.monotonic() + 30
        while not found.query("manta_refusals_total") and time.monotonic() < deadline:
            time.sleep(SCRAPE_S)
        yield found


async def load(url: str, keys: Keys) -> Counted:
    """Send good and bad requests, each on a connection of its own, to reach both ingresses."""
    counted = Counted()
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        for number in range(ROUNDS):
            asks = [_ask(session, keys.user, counted, number, i) for i in range(PER_ROUND)]
            await asyncio.gather(*asks)
            async with session.get("/v1/models") as refused:
                counted.unauthorized += refused.status == 401
            await asyncio.sleep(SCRAPE_S)
    return counted


async def _ask(
    session: aiohttp.ClientSession, key: str, counted: Counted, number: int, index: int
) -> None:
    streamed, is_bad, n = index % 2 == 1, index == PER_ROUND - 1, 1 + index % 3
    body: dict[str, Any] = {
        "prompt": [9 + number, *range(20, 60 + index)],
        "max_tokens": "many" if is_bad else 16 + index,
        "ignore_eos": True,
        "n": n,
        "stream": streamed,
    }
    if streamed:
        body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post("/v1/completions", json=body, headers=headers) as reply:
        text = await reply.text()
    counted.requests[reply.status] += 1
    if reply.status != 200:
        return
    if streamed:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        usage = next(usage for event in events if (usage := json.loads(event).get("usage")))
    else:
        usage = json.loads(text)["usage"]
    counted.sequences += n
    counted.prompt += usage["prompt_tokens"] * n
    counted.generated += usage["completion_tokens"]


def settle(found: Prometheus, counted: Counted) -> list[Result]:
    """Wait until Prometheus has the client's totals, and say what it has."""
    expected: dict[str, float] = {
        "sum(manta_requests_total)": counted.requests.total(),
        **{
            f'sum(manta_requests_total{{status="{status}"}})': number
            for status, number in counted.requests.items()
        },
        "sum(manta_sequences_total)": counted.sequences,
        "sum(manta_prompt_tokens_total)": counted.prompt,
        "sum(manta_generation_tokens_total)": counted.generated,
        "sum(manta_engine_prompt_tokens_total)": counted.prompt,
        "sum(manta_engine_generation_tokens_total)": counted.generated,
        'sum(manta_key_requests_total{key="load"})': counted.requests.total(),
        'sum(manta_key_prompt_tokens_total{key="load"})': counted.prompt,
        'sum(manta_key_generation_tokens_total{key="load"})': counted.generated,
        'sum(manta_refusals_total{reason="unauthorized"})': counted.unauthorized,
        "sum(manta_queue_time_seconds_count)": counted.sequences,
        "sum(vllm:prompt_tokens_total)": counted.prompt,
        "sum(vllm:generation_tokens_total)": counted.generated,
        "sum(vllm:request_success_total)": counted.sequences,
        "sum(manta_ingress_up)": 2,
        "count(sum by (ingress) (manta_requests_total) > 0)": 2,
        'up{job="manta"}': 1,
        'count(ALERTS{alertstate="firing"}) or vector(0)': 0,
    }
    deadline = time.monotonic() + SETTLE_S
    while True:
        values = {expression: found.total(expression) for expression in expected}
        if values == expected or time.monotonic() > deadline:
            break
        time.sleep(SCRAPE_S)
    return [
        Result(name, f"{values[name]:g}", "" if values[name] == right else f"not {right:g}")
        for name, right in expected.items()
    ]


def check_queries(found: Prometheus) -> Iterator[Result]:
    """Queries of the dashboard, and for vLLM's names, return numbers."""
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", WINDOW)
            yield _check(found, panel["title"], expression.replace("$model_name", ".*"))
    for expression in vllm_queries():
        yield _check(found, "vLLM", expression)


def vllm_queries() -> Iterator[str]:
    """What a dashboard for vLLM asks for: quantiles and means, rates, gauges, of one model."""
    model = f'{{model_name="{MODEL}"}}'
    for name in HISTOGRAMS.values():
        rates = {end: f"rate({name}_{end}{model}[{WINDOW}])" for end in ("bucket", "sum", "count")}
        yield f"histogram_quantile(0.9, sum by (le) ({rates['bucket']}))"
        yield f"{rates['sum']} / {rates['count']}"
    for name in VLLM_COUNTERS:
        yield f"rate(vllm:{name}{model}[{WINDOW}])"
    for name in VLLM_GAUGES:
        yield f"vllm:{name}{model}"


def _check(found: Prometheus, title: str, expression: str) -> Result:
    values = [value for _, value in found.query(expression) if not math.isnan(value)]
    shown = f"{len(values)} series, the first {values[0]:.4g}" if values else ""
    return Result(f"{title}: {expression}", shown, "" if values else "no data")


if __name__ == "__main__":
    sys.exit(main())
