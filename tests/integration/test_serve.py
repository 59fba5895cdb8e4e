"""The whole application over HTTP: one server with little KV room for all tests here."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.servers import ManagedServer
from tests.support.api_calls import JSON
from tests.support.chaos_load import make_cases
from tests.support.http_server import manta, metric, settled_metric, stream, streams, wait_idle

KV_TOKENS = 4096
PROMPT, OUTPUT = 184, 24  # 208 tokens with pages: room for about 20 at once
VOCAB = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[ManagedServer]:
    with manta(max_total_tokens=KV_TOKENS, max_queued_requests=400, dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ManagedServer) -> str:
    return server.base_url


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(6, VOCAB) for _ in range(n)]


def complete(url: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    data: dict[str, Any] = reply.json()
    return data


def test_openai_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [m.id for m in client.models.list()] == ["manta-small"]
    whole = client.chat.completions.create(
        model="manta-small",
        messages=[{"role": "user", "content": "What does os.path.join do?"}],
        max_tokens=24,
        temperature=0,
    )
    parts = client.chat.completions.create(
        model="manta-small",
        messages=[{"role": "user", "content": "What does os.path.join do?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in parts:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content != ""
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_n_and_seed(url: str) -> None:
    body = dict(prompt="def ", max_tokens=12, temperature=1.0, n=3, seed=5, return_token_ids=True)
    first, second = complete(url, **body), complete(url, **body)
    tokens = [c["token_ids"] for c in first["choices"]]
    assert tokens == [c["token_ids"] for c in second["choices"]]
    assert len({tuple(t) for t in tokens}) == 3
    assert first["usage"]["completion_tokens"] == sum(map(len, tokens))


def test_stop_string_ends_early_and_frees(url: str) -> None:
    body = dict(prompt="def ", max_tokens=200, temperature=0, return_token_ids=True)
    text = complete(url, **body)["choices"][0]["text"]
    stop = text[20:24]
    out = complete(url, **body, stop=stop)["choices"][0]
    assert out["finish_reason"] == "stop"
    assert out["text"] == text[: text.index(stop)]
    wait_idle(url, 5.0)


def test_bad_requests_leave_the_server_well(url: str) -> None:
    cases = [
        ({"prompt": ids(random.Random(1), KV_TOKENS), "max_tokens": 4}, "prompt"),
        ({"prompt": [VOCAB], "max_tokens": 4}, "prompt"),
        ({"prompt": "", "max_tokens": 4}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "n": 10_000}, "n"),
    ]
    for body, param in cases:
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert reply.status_code == 400, (body, reply.text)
        assert reply.json()["error"]["param"] == param
    broken = httpx.post(
        f"{url}/v1/completions", content=b'{"prompt": NaN', headers=JSON, timeout=30
    )
    assert broken.status_code == 400
    unknown = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert unknown.status_code == 404
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert complete(url, prompt="x", max_tokens=2)["choices"][0]["finish_reason"]


def test_200_streams_with_room_for_20(url: str) -> None:
    """All finish, each equal to its solo run; retraction and eviction are at work."""
    cases = make_cases(url, 200, OUTPUT, seed=2, prompt_len=range(PROMPT, PROMPT + 1))
    got = asyncio.run(streams(url, [case.body for case in cases]))
    assert [g.error for g in got if g.error] == []
    assert all(g.done and g.finish_reason == "length" for g in got)
    pairs = zip(got, cases, strict=True)
    wrong = [i for i, (g, case) in enumerate(pairs) if g.token_ids != case.token_ids]
    assert wrong == []
    wait_idle(url, 5.0)


def test_50_clients_cut_mid_stream(url: str) -> None:
    rng = random.Random(3)
    bodies = [dict(prompt=ids(rng, 30), max_tokens=1500, ignore_eos=True) for _ in range(50)]
    # Only those that are running stream at all; the others are cut while they wait.
    started = time.monotonic()

    async def cut() -> None:
        tasks = [asyncio.ensure_future(streams(url, [b], cut_after=3)) for b in bodies]
        await asyncio.wait(tasks, timeout=4.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cut())
    assert time.monotonic() - started < 30
    wait_idle(url, 2.0)


def test_shared_prefix_is_prefilled_once(url: str) -> None:
    rng = random.Random(4)
    shared = ids(rng, 1500)
    bodies = [
        dict(
            prompt=shared + ids(rng, 8),
            max_tokens=4,
            temperature=0,
            stream_options={"include_usage": True},
        )
        for _ in range(64)
    ]
    prompt_before = settled_metric(url, "manta_engine_prompt_tokens_total")
    cached_before = metric(url, "manta_engine_cached_tokens_total")
    got = asyncio.run(streams(url, bodies))
    cached = [g.usage["prompt_tokens_details"]["cached_tokens"] for g in got if g.usage]
    assert len(cached) == 64
    whole_pages = 1500 // 16 * 16
    assert sorted(cached)[0] < 512, "the first one computes it"
    assert sum(c == whole_pages for c in cached) == 63
    computed = (settled_metric(url, "manta_engine_prompt_tokens_total") - prompt_before) - (
        metric(url, "manta_engine_cached_tokens_total") - cached_before
    )
    assert computed < 1508 + 63 * (8 + 16)


def test_slow_reader_holds_nobody_up(url: str) -> None:
    async def run() -> None:
        import aiohttp

        async with aiohttp.ClientSession() as session:
            body = dict(prompt="x", max_tokens=600, ignore_eos=True, stream=True)
            async with session.post(f"{url}/v1/completions", json=body) as slow:
                assert slow.status == 200
                await asyncio.sleep(1)  # reads nothing
                quick = await stream(session, url, dict(prompt="y", max_tokens=8))
                assert quick.done

    asyncio.run(run())


def test_metrics_and_version(url: str) -> None:
    httpx.post(f"{url}/v1/completions", json=dict(prompt="def ", max_tokens=2), timeout=60)
    assert metric(url, "manta_requests_total") > 0
    assert metric(url, "manta_engine_kv_total_tokens") == KV_TOKENS
    assert httpx.get(f"{url}/version", timeout=30).json()["version"]


def test_trace_follows_steps_through_scheduler_and_worker(url: str) -> None:
    httpx.post(f"{url}/v1/completions", json=dict(prompt="def ", max_tokens=8), timeout=60)
    events = httpx.get(f"{url}/debug/trace?last=5", timeout=30).json()["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, dict[int, dict[str, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            track = tracks[e["pid"], e["tid"]]
            spans.setdefault(f"{track}: {e['name'].split()[0]}", {})[e["args"]["step"]] = e
    schedule, process = spans["scheduler: schedule"], spans["scheduler: process"]
    stage = spans["stage 0, tensor rank 0: step"]
    assert len(schedule) == 5
    for step in schedule.keys() & stage.keys():
        # One machine, one clock: scheduled, run, processed.
        assert schedule[step]["ts"] <= stage[step]["ts"] + 1e3
        assert stage[step]["ts"] + stage[step]["dur"] <= process[step]["ts"] + 1e3
