"""Figures of a serving run: what the requests' results add up to, and how they print."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.load.client import RequestResult
from benchmarks.load.output import percentiles, print_table

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
QUANTILES = ("mean", "p50", "p90", "p99")
ERRORS_KEPT = 5

Distribution = dict[str, float]


@dataclass
class RunReport:
    """One measured run. Rates count successful requests only; latencies are milliseconds."""

    label: str
    concurrency: int | None
    request_rate: float | None
    """Offered requests per second; None where all were sent as fast as `concurrency` let them."""
    requests: int
    failed: int
    """Failed requests, those of the warm-up included."""
    errors: dict[str, int]
    """The most frequent error messages and how often each occurred."""
    duration_s: float
    """Seconds from sending the first request to the end of the last one."""
    output_tok_s: float
    total_tok_s: float
    """Prompt and output tokens per second."""
    requests_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    """Gaps between content chunks; where `tokens_per_chunk` is not 1 a gap is not a token's."""
    e2e_ms: Distribution
    client_wait_ms: Distribution
    """How late requests were sent at an offered rate, because `concurrency` others were open."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that the server says came from its prefix cache; 0 if it does not say."""
    tokens_per_chunk: float
    max_tokens_per_chunk: int | None
    """None where the server does not tell the tokens of a chunk."""
    client_cpu_s: float
    load_1min: float
    """Load average of the client's machine just before the run."""
    server_cpu_s: float | None = None
    """CPU time of the server's processes during the run, where this process started them."""
    outputs: list[list[int]] = field(default_factory=list, repr=False)
    """Output ids by request, where token ids were asked for. Not part of the saved figures."""

    def figures(self) -> dict[str, object]:
        """The report as plain values for JSON, without the output ids."""
        return {key: value for key, value in vars(self).items() if key != "outputs"}


def summarise(
    results: Sequence[RequestResult],
    warmup_errors: Sequence[str | None],
    *,
    label: str,
    concurrency: int | None,
    request_rate: float | None,
    duration_s: float,
    client_cpu_s: float,
    load_1min: float,
) -> RunReport:
    """Add up the results of one run; of its warm-up only the errors count."""
    good = [result for result in results if result.error is None]
    errors = Counter(result.error for result in results if result.error is not None)
    errors.update(f"in warm-up: {error}" for error in warmup_errors if error is not None)
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in good)
    chunks = sum(result.chunks for result in good)
    told = [tokens for result in good for tokens in result.chunk_tokens]
    return RunReport(
        label=label,
        concurrency=concurrency,
        request_rate=request_rate,
        requests=len(results),
        failed=errors.total(),
        errors=dict(errors.most_common(ERRORS_KEPT)),
        duration_s=duration_s,
        output_tok_s=output_tokens / duration_s,
        total_tok_s=(prompt_tokens + output_tokens) / duration_s,
        requests_s=len(good) / duration_s,
        ttft_ms=_milliseconds([result.ttft for result in good]),
        tpot_ms=_milliseconds([result.tpot for result in good if result.tpot is not None]),
        itl_ms=_milliseconds([gap for result in good for gap in result.itl]),
        e2e_ms=_milliseconds([result.e2e for result in good]),
        client_wait_ms=_milliseconds([r.client_wait for r in good] if request_rate else []),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(result.cached_tokens for result in good),
        tokens_per_chunk=output_tokens / chunks if chunks else 0.0,
        max_tokens_per_chunk=max(told) if told else None,
        client_cpu_s=client_cpu_s,
        load_1min=load_1min,
        outputs=[result.token_ids for result in results],
    )


def print_reports(reports: Sequence[RunReport]) -> None:
    """Print throughput by run, the latency distributions by run, then every kind of error."""
    print_table(
        ["run", "conc", "req/s offered", "load", "requests", "failed", "out tok/s", "total tok/s",
         "req/s", "tok/chunk", "cached", "client cpu s", "seconds"],
        [
            [r.label, r.concurrency, r.request_rate, r.load_1min, r.requests, r.failed,
             r.output_tok_s, r.total_tok_s, r.requests_s, r.tokens_per_chunk, r.cached_tokens,
             r.client_cpu_s, r.duration_s]
            for r in reports
        ],
    )  # fmt: skip
    print()
    rows: list[list[object]] = []
    for report in reports:
        for name in LATENCIES:
            latency: Distribution = getattr(report, name)
            rows.append([report.label, name, *(latency.get(quantile) for quantile in QUANTILES)])
    print_table(["run", "latency", *QUANTILES], rows)
    for report in reports:
        for message, count in report.errors.items():
            print(f"FAILED {report.label}: {count} x {message}")


def medians(reports: Sequence[RunReport]) -> dict[str, float]:
    """Medians over repeats of the figures that runs are compared by."""
    columns: dict[str, list[float]] = {
        "output_tok_s": [report.output_tok_s for report in reports],
        "requests_s": [report.requests_s for report in reports],
    }
    for name in LATENCIES:
        for quantile in ("mean", "p50", "p99"):
            values = [getattr(report, name).get(quantile) for report in reports]
            columns[f"{name}_{quantile}"] = [value for value in values if value is not None]
    return {name: statistics.median(values) for name, values in columns.items() if values}


def _milliseconds(seconds: Sequence[float]) -> Distribution:
    return percentiles([value * 1e3 for value in seconds])
