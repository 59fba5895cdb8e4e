"""A constant load of streams. Each stream is compared with its undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx

from tests.support.http_server import Streamed, stream

VOCAB = 4096
FAILED_PAUSE_S = 0.5
"""A client whose stream failed waits so long."""
GAP = 1e-4
"""Two best tokens closer than this may swap places when a batch is composed differently."""


@dataclass(frozen=True)
class Case:
    """A request and its tokens when nothing disturbs it."""

    body: dict[str, Any]
    token_ids: list[int]


def make_cases(
    url: str,
    count: int,
    output: int,
    seed: int = 1,
    prompt_len: range = range(20, 90),
    headers: dict[str, str] | None = None,
) -> list[Case]:
    """Greedy requests with answers that rounding can't change, run one by one.

    A batch rounds differently than a single row; prompts for which that matters are left out.
    """
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        prompt = [rng.randrange(6, VOCAB) for _ in range(rng.choice(prompt_len))]
        body = dict(prompt=prompt, max_tokens=output, temperature=0, ignore_eos=True)
        reply = httpx.post(
            f"{url}/v1/completions",
            json={**body, "logprobs": 2, "return_token_ids": True},
            headers=headers,
            timeout=120,
        ).json()
        choice = reply["choices"][0]
        gaps = [
            max(top.values()) - min(top.values()) if len(top) == 2 else 0.0
            for top in choice["logprobs"]["top_logprobs"]
        ]
        if min(gaps) > GAP:
            cases.append(Case(body, choice["token_ids"]))
    return cases


@dataclass
class Load:
    """`num_streams` clients, each with one stream open at any time until `stop` is set."""

    url: str
    cases: list[Case]
    num_streams: int
    stagger_s: float = 0.0
    """Seconds over which the clients begin one after the other."""
    headers: dict[str, str] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    finished: list[Streamed] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_tokens: int = 0

    async def run(self) -> None:
        """Stream until stopped, then finish what is open."""
        turns = itertools.cycle(self.cases)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=90)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self.headers
        ) as session:

            async def client(pause_s: float) -> None:
                await asyncio.sleep(pause_s)
                while not self.stop.is_set():
                    await self._one(session, next(turns))

            n = self.num_streams
            await asyncio.gather(*(client(i / n * self.stagger_s) for i in range(n)))

    async def _one(self, session: aiohttp.ClientSession, case: Case) -> None:
        try:
            got = await stream(session, self.url, case.body)
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(FAILED_PAUSE_S)
            return
        self.finished.append(got)
        self.num_tokens += len(got.token_ids)
        if got.error is not None or not got.done:
            self.failures.append(f"status {got.status}, error {got.error}, [DONE] {got.done}")
            await asyncio.sleep(FAILED_PAUSE_S)
        elif got.token_ids != case.token_ids:
            at = next(
                (
                    i
                    for i, pair in enumerate(zip(got.token_ids, case.token_ids, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(got.token_ids), len(case.token_ids)),
            )
            self.failures.append(f"other tokens from {at} on, of {len(got.token_ids)}")

    def stalls(self, since: float, until: float) -> list[float]:
        """For every stream that waited for its next token at `since`: the seconds until the token
        came, longest first. Streams that had a token within half a second are left out."""
        waits = []
        for got in self.finished:
            for before, after in itertools.pairwise([got.started, *got.times]):
                if before <= since + 0.5 and since < after <= until and after - since > 0.5:
                    waits.append(after - since)
        return sorted(waits, reverse=True)

    def median_gap_s(self, since: float) -> float:
        """Median seconds between chunks that came after `since`, of finished streams."""
        gaps = [
            after - before
            for got in self.finished
            for before, after in itertools.pairwise(got.times)
            if before >= since
        ]
        return statistics.median(gaps)
