"""TP x PP under Ray: same tokens, supervision, clean start and stop."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx

from engine import LLM, SamplingParams
from tests.support.http_server import disturbed_streams, manta_leaving_nothing, streams
from tests.support.processes import actor_pids, launch_mark
from tests.support.random_schemas import check_json

PROMPTS = [[random.Random(i).randrange(6, 4096) for _ in range(20 + i)] for i in range(6)]
OUTPUT = 24
POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "x": {"type": "integer", "minimum": -99, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "naïve"]}, "maxItems": 3},
    },
    "required": ["name", "x", "tags"],
    "additionalProperties": False,
}


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

        _structured_output(url)
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


def _structured_output(url: str) -> None:
    """Constrained requests beside free ones in the micro-batches: all finish, and are right."""
    fixed = {
        "regex": r"[A-Z][a-z]{2,8}-\d{3}",
        "choice": ["yes", "no", "no way"],
        "grammar": 'start: NUMBER ("+" NUMBER){0,5}\nNUMBER: /[1-9][0-9]{0,3}/',
    }
    bodies: list[dict[str, Any]] = []
    for seed in range(24):
        body = dict(prompt=f"def f{seed}(", max_tokens=200, temperature=1, seed=seed)
        kind = ["regex", "choice", "grammar", "json", None][seed % 5]
        if kind is not None:
            body["structured_outputs"] = {kind: fixed.get(kind, POINT)}
        bodies.append(body)
    for body, got in zip(bodies, asyncio.run(streams(url, bodies)), strict=True):
        assert got.error is None and got.done, got
        match body.get("structured_outputs"):
            case {"json": _}:
                check_json(got.text, POINT)
            case {"choice": _}:
                assert got.text in fixed["choice"]
            case {"regex": pattern}:
                assert re.fullmatch(pattern, got.text), got.text
            case {"grammar": _}:
                assert re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3}){0,5}", got.text), got.text


async def _kill_mid_stream(url: str, pid: int) -> None:
    """kill -9 a role under streams: they go on as if nothing had been, also within a grammar."""
    free = dict(prompt="def ", max_tokens=400, temperature=0, ignore_eos=True)
    words = dict(prompt="x", max_tokens=400, temperature=1, seed=3)
    words["structured_outputs"] = {"regex": r"([a-z]{1,9}-\d,){90}"}
    bodies = [free, words]
    undisturbed = await streams(url, bodies)
    async with asyncio.timeout(120):
        disturbed = await disturbed_streams(url, bodies, lambda: os.kill(pid, signal.SIGKILL))
    for got, before in zip(disturbed, undisturbed, strict=True):
        assert got.error is None and got.done, got
        assert (got.token_ids, got.text) == (before.token_ids, before.text)
        gap = max(b - a for a, b in itertools.pairwise(got.times))
        assert gap > 0.5, "it was killed too late"
    assert re.fullmatch(r"([a-z]{1,9}-\d,)*[a-z]{0,9}(-\d?)?", disturbed[1].text)


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
