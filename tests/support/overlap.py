"""Harnesses that know what the steps in flight are using."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol.messages import AbortRequest
from engine.protocol.sampling_params import SamplingParams
from engine.scheduler.req import Req
from engine.tokenizer import DetokenizerManager, Tokenizer
from tests.support.registering import register
from tests.support.scheduler_harness import Harness
from tests.support.tiny_tokenizers import write_byte_level


class Overlap(Harness):
    """Two steps in flight. It records what each touches and how often memory is given back."""

    def __init__(self, **overrides: Any) -> None:
        super().__init__(**{"lookahead": 2, **overrides})
        self.touched: dict[int, tuple[set[int], set[int]]] = {}
        """Step in flight -> its rows, and all pages that it reads or writes."""
        self.released: Counter[int] = Counter()
        """How often the memory of a request was given back, by rid."""
        release = self.scheduler.kv.release

        def counted(req: Req, *, insert: bool) -> None:
            self.released[req.rid] += 1
            release(req, insert=insert)

        self.scheduler.kv.release = counted  # type: ignore[method-assign]

    def req(self, rid: int) -> Req:
        return self.scheduler.requests.by_key[("c", rid)]

    def launch(self) -> bool:
        launched = super().launch()
        if launched:
            batch = self.worker.pending[-1]
            table = self.scheduler.kv.rows.req_to_token
            rows = batch.req_pool_indices.tolist()
            slots = [table[r, :n] for r, n in zip(rows, batch.seq_lens.tolist(), strict=True)]
            pages = np.concatenate(slots) // self.config.engine.page_size
            self.touched[batch.step] = (set(rows), set(pages.tolist()))
        return launched

    def process(self) -> None:
        step = self.worker.pending[0].step
        super().process()
        del self.touched[step]

    def abort(self, rid: int) -> None:
        self.aborted.add(("c", rid))
        self.scheduler.abort(AbortRequest(rid=rid, reply_to="c"))

    def steps_with(self, rid: int) -> int:
        """Steps in flight that hold the request."""
        row = self.req(rid).req_pool_idx
        return sum(row in rows for rows, _ in self.touched.values())

    def check_in_flight(self) -> None:
        """Check that no memory that a step in flight touches can be given to another request.

        Cached prefixes are evicted first: memory that may be evicted at any time counts as free.
        """
        kv = self.scheduler.kv
        kv.tree.evict(kv.total_size)
        rows: list[int] = []
        while (row := kv.rows.alloc()) is not None:
            rows.append(row)
        for row in reversed(rows):
            kv.rows.free(row)
        pages = set(kv.allocator.free_pages().tolist())
        for used_rows, used_pages in self.touched.values():
            assert not used_rows.intersection(rows), "row of a step in flight is free"
            assert not used_pages & pages, "page of a step in flight is free"


class AnyOrder(Harness):
    """A device that finishes micro-batches in any order.

    This is harsher than our devices, on which only the sampling of a delayed step runs behind later
    steps of other micro-batches. There is room for one request at a time: the next one gets the
    memory that the first gives back.
    """

    def __init__(self) -> None:
        super().__init__(
            lookahead=2,
            num_micro_batches=2,
            max_micro_batch_size=1,
            max_running_requests=1,
            schedule_policy="fcfs",
        )

    def process_of(self, micro_batch: int) -> None:
        """Run the oldest step of one micro-batch, if it has one, before all others."""
        pending = self.worker.pending
        for at, batch in enumerate(pending):
            if batch.micro_batch == micro_batch:
                pending.rotate(-at)
                self.worker.steps_seen = 0
                self.process()
                pending.rotate(at)
                self.worker.steps_seen = 0
                return


class Reader(Overlap):
    """One request, number 1, whose client turns tokens into text."""

    def __init__(self, prompt: list[int], max_tokens: int, *stop: str) -> None:
        super().__init__()
        self.detokenizer = DetokenizerManager(tiny_tokenizer())
        self.text = ""
        self.end: tuple[str | None, str | int | None] = (None, None)
        self.add(1, prompt, max_tokens)
        self.detokenizer.add(register(1, SamplingParams(stop=list(stop)), prompt))

    def collect(self) -> None:
        for _, out in self.scheduler.take_outputs():
            assert not (self.aborted and len(out.rids)), "token after abort"
            for delta in self.detokenizer.process(out)[0]:
                self.text += delta.text
                if delta.finish_reason is not None:
                    self.end = (delta.finish_reason, delta.stop_reason)

    def drain(self) -> None:
        for _ in range(100):
            if not self.step() and self.scheduler.is_idle:
                return
        pytest.fail("no end in sight")


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_pretrained(write_byte_level(Path(folder)))


def two_running(**overrides: Any) -> Overlap:
    """Requests 1 and 2 with a committed token and two decode steps in flight."""
    h = Overlap(**overrides)
    h.add(1, [1, 2, 3, 4, 5], 20)
    h.add(2, [6, 7, 8], 20)
    h.launch()
    h.launch()
    h.process()
    h.launch()
    assert h.steps_with(1) == h.steps_with(2) == 2
    return h
