"""TP x PP under Ray: same tokens, supervision, clean start and stop."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable

import aiohttp
import httpx

from engine import LLM, SamplingParams
from tests.support.http_server import manta_leaving_nothing, stream
from tests.support.processes import actor_pids, launch_mark

PROMPTS = [[random.Random(i).randrange(6, 4096) for _ in range(20 + i)] for i in range(6)]
OUTPUT = 24


def test_tp2_pp2_serves_the_same_tokens_and_restarts_as_a_unit() -> None:
    with LLM(dtype="float32", max_total_tokens=4096, cpu_threads=1) as llm:
        params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
        expected = [r.outputs[0].token_ids for r in llm.generate(PROMPTS, params, use_tqdm=False)]
    args = {"dtype": "float32", "max_total_tokens": 4096}
    with manta_leaving_nothing("configs/llama-tp2-pp2.yaml", **args) as server:
        url = server.base_url
        body = dict(prompt=PROMPTS, max_tokens=OUTPUT, temperature=0, ignore_eos=True)
        reply = httpx.post(
            f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120
        ).json()
        assert "choices" in reply, reply
        assert [c["token_ids"] for c in reply["choices"]] == expected

        mark = launch_mark(server.pid)
        for actor, count in (("WorkerActor", 4), ("SchedulerActor", 1), ("TokenizerActor", 1)):
            assert len(actor_pids(mark, actor)) == count, actor
        # tests/chaos kills the other roles: the scheduler's death restarts the unit as a worker's.
        asyncio.run(_kill_mid_stream(url, actor_pids(mark, "WorkerActor")[-1]))
        _wait_health(url, lambda status: status == 200, 90)
        again = httpx.post(
            f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120
        ).json()
        assert [c["token_ids"] for c in again["choices"]] == expected
        assert len(actor_pids(mark, "WorkerActor")) == 4


async def _kill_mid_stream(url: str, pid: int) -> None:
    """kill -9 a role under a stream: the stream goes on as if nothing had been."""
    body = dict(prompt="def ", max_tokens=400, temperature=0, ignore_eos=True)
    async with aiohttp.ClientSession() as session:
        undisturbed = await stream(session, url, body)
        task = asyncio.ensure_future(stream(session, url, body))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            got = await task
    assert got.error is None and got.done, got
    assert (got.token_ids, got.text) == (undisturbed.token_ids, undisturbed.text)
    assert max(b - a for a, b in itertools.pairwise(got.times)) > 0.5, "it was killed too late"


def _wait_health(url: str, wanted: Callable[[int | None], bool], limit_s: float) -> None:
    """Poll /health until its status (None: no answer) is `wanted`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            status: int | None = httpx.get(f"{url}/health", timeout=10).status_code
        except httpx.HTTPError:
            status = None
        if wanted(status):
            return
        assert time.monotonic() < deadline, f"/health stayed {status}"
        time.sleep(0.2)
