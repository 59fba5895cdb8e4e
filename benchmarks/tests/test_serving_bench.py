"""The serving benchmark: its arithmetic, its client against a fake endpoint, its servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from benchmarks import serving
from benchmarks.load import command
from benchmarks.load.client import Event, RequestRecord, RequestResult, analyse
from benchmarks.load.load import Workload, arrival_offsets, make_prompts
from benchmarks.load.report import RunReport, medians, summarise
from benchmarks.peers import compare, vllm_cpu
from benchmarks.servers import ManagedServer, ServerError, free_port

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}


# --- one request's figures ------------------------------------------------------------------------


def chunk(time_s: float, text: str = "", **choice: object) -> Event:
    return event(time_s, choices=[{"index": 0, "text": text, "finish_reason": None, **choice}])


def event(time_s: float, **message: object) -> Event:
    return Event(time_s, json.dumps(message).encode())


def done(time_s: float) -> Event:
    return Event(time_s, b"[DONE]")


def record(*events: Event) -> RequestRecord:
    return RequestRecord(due=9.5, sent=10.0, ended=events[-1].time, events=list(events))


GOOD = (
    chunk(10.5, "a"),
    chunk(10.75, "b"),
    chunk(11.5, "c", finish_reason="length"),
    event(11.6, choices=[], usage=USAGE),
    done(11.75),
)


def test_latencies_of_one_stream() -> None:
    result = analyse(record(*GOOD), expected_tokens=3)
    assert result == RequestResult(
        error=None,
        client_wait=0.5,
        ttft=0.5,
        tpot=0.5,
        e2e=1.75,
        itl=[0.25, 0.75],
        chunks=3,
        chunk_tokens=[],
        prompt_tokens=7,
        output_tokens=3,
        cached_tokens=5,
        token_ids=[],
    )


def test_chunks_without_content_are_not_tokens() -> None:
    role = event(10.1, choices=[{"delta": {"role": "assistant", "content": ""}}])
    content = [event(t, choices=[{"delta": {"content": "x"}}]) for t in (10.5, 11.0)]
    last = event(11.5, choices=[{"delta": {}, "finish_reason": "stop"}])
    result = analyse(record(role, *content, last, event(11.5, choices=[], usage=USAGE), done(12)))
    assert (result.error, result.ttft, result.itl, result.tpot) == (None, 0.5, [0.5], 0.25)


def test_token_ids_count_tokens_that_are_no_text_yet() -> None:
    first, second = chunk(10.5, "", token_ids=[4]), chunk(11.5, "é", token_ids=[5, 6])
    end = event(11.5, choices=[{"finish_reason": "length", "text": ""}], usage=USAGE)
    result = analyse(record(first, second, end, done(12)), expected_tokens=3)
    assert result.error is None
    assert (result.ttft, result.chunk_tokens, result.token_ids) == (0.5, [1, 2], [4, 5, 6])


def test_continuous_usage_counts_the_tokens_of_a_chunk() -> None:
    chunks = [
        event(10 + n, choices=[{"text": "x"}], usage={"completion_tokens": n}) for n in (1, 3, 4)
    ]
    end = event(15, choices=[{"text": "", "finish_reason": "stop"}])
    result = analyse(record(*chunks, end, done(15)))
    assert (result.error, result.chunk_tokens, result.output_tokens) == (None, [1, 2, 1], 4)


def test_one_token_has_no_tpot() -> None:
    usage = event(11, choices=[], usage={"completion_tokens": 1})
    result = analyse(record(chunk(10.5, "a", finish_reason="stop"), usage, done(11)))
    assert (result.error, result.tpot, result.itl) == (None, None, [])


@pytest.mark.parametrize(
    ("events", "expected_tokens", "message"),
    [
        (GOOD[:-1], 3, "without [DONE]"),
        ((*GOOD[:3], done(12)), 3, "no usage"),
        ((*GOOD[:2], *GOOD[3:]), 3, "no finish_reason"),
        (GOOD, 4, "3 output tokens instead of 4"),
        ((chunk(10.5, finish_reason="stop"), *GOOD[3:]), 3, "no chunk with content"),
        ((GOOD[0], event(11, error={"message": "boom"}), done(12)), 3, "boom"),
        ((GOOD[0], Event(11, b"{"), done(12)), 3, "no JSON"),
    ],
)
def test_a_broken_stream_is_an_error(
    events: tuple[Event, ...], expected_tokens: int, message: str
) -> None:
    error = analyse(record(*events), expected_tokens).error
    assert error is not None and message in error


# --- a run's figures ------------------------------------------------------------------------------


def result_of(ttft: float, error: str | None = None) -> RequestResult:
    return RequestResult(
        error=error,
        client_wait=0.0,
        ttft=ttft,
        tpot=0.01,
        e2e=1.0,
        itl=[0.01, 0.03],
        chunks=2,
        chunk_tokens=[1, 3],
        prompt_tokens=10,
        output_tokens=4,
        cached_tokens=1,
        token_ids=[],
    )


def summary(results: list[RequestResult], warmup_errors: list[str | None]) -> RunReport:
    return summarise(
        results,
        warmup_errors,
        label="x",
        concurrency=2,
        request_rate=None,
        duration_s=2.0,
        client_cpu_s=0.1,
        load_1min=0.5,
    )


def test_percentiles_and_rates() -> None:
    report = summary([result_of(t) for t in (0.4, 0.1, 0.3, 0.2)], [None])
    assert report.ttft_ms == pytest.approx({"mean": 250, "p50": 250, "p90": 370, "p99": 397})
    assert report.itl_ms["p50"] == pytest.approx(20)
    assert (report.output_tok_s, report.total_tok_s, report.requests_s) == (8.0, 28.0, 2.0)
    assert (report.tokens_per_chunk, report.max_tokens_per_chunk) == (2.0, 3)
    assert (report.failed, report.errors, report.cached_tokens) == (0, {}, 4)


def test_failures_count_and_take_no_part_in_figures() -> None:
    results = [result_of(0.1), result_of(9.0, "bad"), result_of(9.0, "bad")]
    report = summary(results, [None, "HTTP 500"])
    assert (report.requests, report.failed) == (3, 3)
    assert report.errors == {"bad": 2, "in warm-up: HTTP 500": 1}
    assert report.ttft_ms["p99"] == pytest.approx(100)
    assert report.output_tok_s == 2.0


def test_medians_over_repeats() -> None:
    reports = [summary([result_of(ttft)], []) for ttft in (0.3, 0.1, 0.2)]
    assert medians(reports)["ttft_ms_mean"] == pytest.approx(200)


def test_ratios_are_manta_over_vllm_of_the_same_kind() -> None:
    results: compare.Results = {}
    for engine, ttft, output in (("vllm", 0.2, [1, 2]), ("manta", 0.1, [1, 3])):
        report = summary([result_of(ttft)], [])
        report.outputs = [output]
        results[compare.Cell("m", 1, compare.Contender(engine, 1, "float32"))] = [report]
    results[compare.Cell("m", 1, compare.Contender("vllm", 2, "float32"))] = [report]
    (ratio,) = compare.compare(results)
    assert (ratio["threads"], ratio["same_outputs"]) == (1, 0.0)
    assert ratio["ttft_ms_mean"] == pytest.approx(0.5)


def test_code_of_models_is_compared_within_an_engine() -> None:
    results: compare.Results = {}
    for engine, impl, ttft in (
        ("vllm", "native", 0.1),
        ("vllm", "transformers", 0.3),
        ("manta", "transformers", 0.2),
    ):
        cell = compare.Cell("m", 1, compare.Contender(engine, 1, "float32", impl))
        results[cell] = [summary([result_of(ttft)], [])]
        results[cell][0].outputs = [[1]]
    (loss,) = compare.compare_impls(results)
    assert loss["server"] == "vllm 1t float32 transformers"
    assert loss["ttft_ms_mean"] == pytest.approx(3.0)
    (ratio,) = compare.compare(results)
    assert (ratio["impl"], ratio["ttft_ms_mean"]) == ("transformers", pytest.approx(2 / 3))


# --- the load -------------------------------------------------------------------------------------


def test_random_prompts_share_only_their_prefix() -> None:
    load = Workload(6, 20, 1, prefix_len=10, num_prefixes=2, min_token_id=5, vocab_size=9)
    prompts = make_prompts(load, seed=1)
    assert prompts == make_prompts(load, seed=1) != make_prompts(load, seed=2)
    assert all(len(prompt) == 30 and set(prompt) <= set(range(5, 9)) for prompt in prompts)
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 2
    assert prompts[0][:10] == prompts[2][:10] != prompts[1][:10]
    assert len({tuple(prompt[10:]) for prompt in prompts}) == 6


def test_text_prompts_share_only_their_prefix() -> None:
    load = Workload(4, 20, 1, dataset="stdlib-text", prefix_len=10)
    prompts = make_prompts(load, seed=1)
    assert prompts == make_prompts(load, seed=1) != make_prompts(load, seed=2)
    assert len({prompt[:40] for prompt in prompts}) == 1
    assert len(set(prompts)) == 4


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    load = Workload(20_000, 1, 1, request_rate=5.0, burstiness=burstiness)
    offsets = arrival_offsets(load, seed=3)
    gaps = np.diff(offsets)
    assert offsets[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_without_a_rate_all_are_due_at_once() -> None:
    assert arrival_offsets(Workload(3, 1, 1), seed=0) == [0.0, 0.0, 0.0]


# --- against a fake endpoint ----------------------------------------------------------------------


class FakeEndpoint:
    """An OpenAI endpoint in a thread: streams `max_tokens` chunks, and misbehaves where told."""

    def __init__(self) -> None:
        self.port = free_port()
        self.in_flight = self.most_in_flight = 0
        self.bodies: list[dict[str, object]] = []
        self.faults: dict[int, str] = {}
        """Fault by the number of the request in order of arrival."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        fault = self.faults.get(len(self.bodies))
        body = await request.json()
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if fault == "status":
                return web.json_response({"error": {"message": "overloaded"}}, status=503)
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            for n in range(body["max_tokens"]):
                finish = "length" if n == body["max_tokens"] - 1 else None
                await self._send(reply, choices=[{"text": f"t{n}", "finish_reason": finish}])
                await asyncio.sleep(0.001)
                if fault == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                    return reply
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            await self._send(reply, choices=[], usage=usage)
            if fault != "no done":
                await reply.write(b"data: [DONE]\n\n")
            return reply
        finally:
            self.in_flight -= 1

    async def _send(self, reply: web.StreamResponse, **message: object) -> None:
        data = f"data: {json.dumps(message)}\n\n".encode()
        await reply.write(data[:9])
        await reply.write(data[9:])


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    yield fake
    fake.close()


def run_serving(
    endpoint: FakeEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
) -> tuple[int, dict[str, object], str]:
    base_url = f"http://127.0.0.1:{endpoint.port}"
    monkeypatch.setattr(sys, "argv", ["serving.py", "--base-url", base_url, *arguments])
    status = serving.main()
    output = capsys.readouterr().out
    return status, json.loads(output.splitlines()[-1]), output


SHORT = ("--num-prompts", "6", "--input-len", "4", "--output-len", "5", "--warmup", "2")


def test_a_good_endpoint_is_measured(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, figures, _ = run_serving(
        endpoint, monkeypatch, capsys, *SHORT, "--concurrency", "1,3", "--repeat", "2"
    )
    assert (status, figures["ok"], figures["model"]) == (0, True, "fake")
    runs = figures["runs"]
    assert isinstance(runs, list) and [run["concurrency"] for run in runs] == [1, 3, 1, 3]
    for run in runs:
        assert (run["requests"], run["failed"]) == (6, 0)
        assert (run["output_tokens"], run["prompt_tokens"]) == (30, 24)
        assert run["ttft_ms"]["mean"] < run["e2e_ms"]["mean"]
        assert run["output_tok_s"] == pytest.approx(30 / run["duration_s"])
    assert endpoint.most_in_flight == 3
    prompts = [tuple(body["prompt"]) for body in endpoint.bodies]  # type: ignore[arg-type]
    assert len(prompts) == len(set(prompts)) == 4 * 8
    assert endpoint.bodies[0]["stream_options"] == {"include_usage": True}
    assert endpoint.bodies[0]["ignore_eos"] is True


def test_extra_fields_go_into_every_request(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = '{"temperature": 1, "structured_outputs": {"regex": "a+"}}'
    status, _, _ = run_serving(endpoint, monkeypatch, capsys, *SHORT, "--extra-body", extra)
    assert status == 0 and endpoint.bodies
    for body in endpoint.bodies:
        assert (body["temperature"], body["structured_outputs"]) == (1, {"regex": "a+"})


def test_every_failure_is_reported(
    endpoint: FakeEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    endpoint.faults = {1: "status", 3: "cut", 5: "no done", 6: "status"}
    saved = tmp_path / "figures.json"
    status, figures, output = run_serving(
        endpoint, monkeypatch, capsys, *SHORT, "--concurrency", "1", "--save", str(saved)
    )
    assert (status, figures["ok"]) == (1, False)
    (run,) = figures["runs"]  # type: ignore[misc]
    assert (run["requests"], run["failed"], run["output_tokens"]) == (6, 4, 15)
    causes = sorted(run["errors"])
    assert [cause[:10] for cause in causes] == [
        "ClientPayl",
        "HTTP 503: ",
        "in warm-up",
        "stream end",
    ]
    assert output.count("FAILED serving c1: 1 x ") == 4
    assert json.loads(saved.read_text())["ok"] is False


def test_requests_are_offered_at_the_rate(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, figures, _ = run_serving(
        endpoint, monkeypatch, capsys, *SHORT, "--request-rate", "40", "--burstiness", "50"
    )
    (run,) = figures["runs"]  # type: ignore[misc]
    assert (run["request_rate"], run["failed"]) == (40.0, 0)
    assert run["client_wait_ms"]["mean"] >= 0
    offered = Workload(6, 4, 5, request_rate=40, burstiness=50)
    assert run["duration_s"] >= arrival_offsets(offered, seed=0)[-1]  # never sent before due


def test_an_absent_endpoint_ends_with_ok_false(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(sys, "argv", ["serving.py", "--base-url", url])
    assert serving.main() == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["ok"] is False and "connect" in figures["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--endpoint", "chat", "--dataset", "random"],
        ["--min-token-id", "10", "--vocab-size", "10"],
        ["--request-rate", "0"],
        ["--concurrency", "0"],
        ["--num-prompts", "x"],
        ["--base-url", "http://h", "--set", "dtype=float32"],
        ["--set", "dtype"],
        ["--extra-body", "{"],
        ["--extra-body", "[1]"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse_arguments(arguments, starts_server=True)


# --- servers under test ---------------------------------------------------------------------------

SERVER = """
import http.server, signal, subprocess, sys
mode, port = sys.argv[1], int(sys.argv[2])
print("mode", mode, flush=True)
if mode == "fails":
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode in ("orphan", "detached"):
    subprocess.Popen(["sleep", "60"], start_new_session=mode == "detached")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" and mode != "sick" else 503)
        self.end_headers()
    def log_message(self, *args): pass
try:
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def managed(mode: str, timeout_s: float = 20.0) -> ManagedServer:
    port = free_port()
    command = [sys.executable, "-c", SERVER, mode, str(port)]
    return ManagedServer(command, dict(os.environ), port, timeout_s=timeout_s, stop_timeout_s=1.0)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended, or does within 10 s of having been killed."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_server_is_waited_for_and_interrupted() -> None:
    with managed("good") as server:
        assert server.ready_s > 0
        assert "mode good" in server.log_tail()
        assert server.cpu_seconds() > 0
    assert not server.killed and gone(server.pid)


def test_a_server_heeds_the_interrupt_where_its_parent_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with managed("good") as server:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert not server.killed and gone(server.pid)


@pytest.mark.parametrize("mode", ["stubborn", "orphan", "detached"])
def test_what_outlives_the_interrupt_is_killed(mode: str) -> None:
    with managed(mode) as server:
        pids = [server.pid, *children_of(server.pid)]
    assert server.killed and all(gone(pid) for pid in pids)
    assert len(pids) == (1 if mode == "stubborn" else 2)


@pytest.mark.parametrize(("mode", "message"), [("fails", "status 3"), ("sick", "not ready")])
def test_a_server_that_does_not_get_ready_shows_its_log(mode: str, message: str) -> None:
    server = managed(mode, timeout_s=20.0 if mode == "fails" else 1.0)
    with pytest.raises(ServerError, match=f"(?s){message}.*mode {mode}"), server:
        pass
    assert gone(server.pid)


# --- the peer's requirements ----------------------------------------------------------------------


def test_requirements_leave_out_extras_and_cuda_builds(tmp_path: Path) -> None:
    wheel = tmp_path / "peer-1-py3-none-any.whl"
    lines = [
        "torch==2.13.0+cpu",
        "torchvision; platform_machine != 'riscv64'",
        "pandas; extra == 'bench'",
        "six>=1.16; python_version < '3'",
        "numpy>=2; python_version > '3'",
        "fastapi[standard]>=0.1",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = "".join(f"Requires-Dist: {line}\n" for line in lines)
        archive.writestr("peer-1.dist-info/METADATA", f"Metadata-Version: 2.1\n{metadata}")
    assert vllm_cpu.requirements(wheel) == ["numpy>=2", "fastapi[standard]>=0.1"]


def test_a_failing_setup_step_is_named() -> None:
    with pytest.raises(vllm_cpu.PeerSetupError, match="status 2"):
        vllm_cpu.run([sys.executable, "-c", "raise SystemExit(2)"])
