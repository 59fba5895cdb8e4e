"""Parts of `speculative.py` without a server: drafting, a simulated device, the scheduler."""

from __future__ import annotations

import inspect
import statistics
import textwrap
import time
from typing import Any

import numpy as np

from benchmarks.common import REPO_ROOT
from benchmarks.engine_driver import Arrivals, EngineDriver
from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.llm import LLM
from engine.loop.engine_core import EngineCore
from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, RowParams, SampleMasks
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.speculative.config import SpeculativeConfig
from engine.speculative.ngram import NgramDrafter

CARRIED = REPO_ROOT / "models" / "manta-small"
DRAFTING_LIMIT_US = 10.0
BUSY_NEEDED = {"device": 0.95, "host": 0.90}
ROWS = 256


# Drafting


def drafting() -> list[dict[str, Any]]:
    """Time of one draft of 4 tokens, the index included."""
    rows = []
    rng = np.random.default_rng(0)
    for context in (1024, 32768):
        # A vocabulary this small makes every n-gram occur before: the dearest look-ups.
        for vocab, kind in ((60, "repeats"), (100_000, "new")):
            drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
            tokens = rng.integers(0, vocab, context).astype(np.int32)
            drafter.install(RowParams(1, context, [], SamplingParams(), tokens))
            more = rng.integers(0, vocab, 4000).tolist()
            began = time.perf_counter()
            for token in more:
                drafter.propose([1], [4])
                drafter.observe(1, [token])
            micros = (time.perf_counter() - began) / len(more) * 1e6
            ok = micros <= DRAFTING_LIMIT_US
            rows.append({"context": context, "tokens": kind, "us_per_row": micros, "ok": ok})
    return rows


# A simulated device


def simulated(steps: int) -> list[dict[str, Any]]:
    """How busy the device is kept."""
    rows = []
    for where, needed in BUSY_NEEDED.items():
        config = {
            "device": "simulated",
            "simulated": {"step_ms": 10.0, "draft_acceptance": 0.7, "drafts_on": where},
            "speculative_config": {"method": "ngram", "draft_length": "fixed"},
            "max_running_requests": 64,
        }
        with EngineDriver(**config) as driver:
            rng = np.random.default_rng(0)
            prompts = [rng.integers(10, 4000, 32).astype(np.int32) for _ in range(64)]
            params = SamplingParams(max_tokens=steps * 2, temperature=0.0, ignore_eos=True)
            driver.add(prompts, [params] * 64)
            driver.collect(Arrivals(), 64)
            stats = driver.stats()
            spans = [span for role in driver.trace(8192) for span in role.stages]
        spans = spans[5 : len(spans) * 3 // 4]  # all rows run
        busy = sum(span.ended_at - span.started_at for span in spans)
        share = busy / (spans[-1].ended_at - spans[0].started_at)
        rows.append(
            {
                "drafts_on": where,
                "busy": share,
                "accepted": stats.spec_decode_accepted_tokens_total
                / max(1, stats.spec_decode_draft_tokens_total),
                "ok": share >= needed,
            }
        )
    return rows


# bfloat16


def bfloat16() -> list[dict[str, Any]]:
    """How often greedy outputs in bfloat16 change, of 32 prompts with 96 tokens: with the batch,
    and with drafts. Our kernels on CPU give a row the same bits in any batch; torch's don't."""
    words = inspect.getsource(textwrap).split("\n\n")
    rows = []
    for backend in ("cpu", "torch"):
        found: dict[str, list[list[int]]] = {}
        for name, at_once, drafts in (("alone", 1, 0), ("batch of 32", 32, 0), ("drafts", 1, 4)):
            config: dict[str, Any] = {}
            if drafts:
                counts = {"num_speculative_tokens": drafts, "draft_length": "fixed"}
                config["speculative_config"] = {"method": "ngram", **counts}
            with LLM(
                str(CARRIED),
                dtype="bfloat16",
                attention_backend=backend,
                max_total_tokens=32768,
                max_model_len=1024,
                max_running_requests=at_once,
                **config,
            ) as llm:
                params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
                prompts = [words[i % len(words)][: 40 + 7 * i] for i in range(32)]
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found[name] = [output.outputs[0].token_ids for output in outputs]
        alone = found.pop("alone")
        changed = {
            name: sum(mine != other for mine, other in zip(outputs, alone, strict=True))
            for name, outputs in found.items()
        }
        ok = changed["drafts"] <= changed["batch of 32"]
        rows.append({"attention_backend": backend, **changed, "ok": ok})
    return rows


# The scheduler


class InstantExecutor(Executor):
    """Answers at once; where rows have drafts, each gives `given` tokens."""

    def __init__(self, num_kv_tokens: int, given: int) -> None:
        self.num_kv_tokens = num_kv_tokens
        self.given = given
        self._results: list[GenerationBatchResult] = []
        self._counts: list[int] = []
        self._drafts: list[int] = []

    def launch(self, batch: ModelWorkerBatch) -> None:
        lines = len(batch.sampled_lines)
        if not batch.checks_drafts:
            self._results.append(GenerationBatchResult(batch.step, [7] * lines))
            return
        if len(self._counts) != lines:
            self._drafts = (batch.run_lens - 1).tolist()
            self._counts = [min(self.given, 1 + count) for count in self._drafts]
        result = GenerationBatchResult(batch.step, [7] * sum(self._counts))
        result.num_tokens, result.num_drafts = self._counts, self._drafts
        self._results.append(result)

    def sample(self, masks: SampleMasks) -> None:
        raise NotImplementedError

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        return self._results.pop(0)

    def shutdown(self) -> None:
        pass


def scheduler() -> list[dict[str, Any]]:
    """CPU time per token of composing, processing and output messages."""
    rows = []
    for given in (0, 3):
        prompts_of_rows = np.random.default_rng(0).integers(10, 4000, (ROWS, 256))
        config: dict[str, Any] = {"speculative_config": {"method": "ngram"}} if given else {}
        engine = EngineConfig(
            model=str(CARRIED),
            max_total_tokens=400_000,
            max_model_len=1000,
            chunked_prefill_size=ROWS * 256,
            **config,
        )
        if engine.speculative_config is not None:
            engine.speculative_config.draft_length = "fixed"
        core = EngineCore(
            Scheduler(SchedulerConfig(engine.resolve(), 400_000)),
            InstantExecutor(400_000, given),
        )
        for rid, prompt in enumerate(prompts_of_rows.astype(np.int32)):
            params = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
            core.scheduler.add(AddRequest(rid=rid, sequence=TokenSequence(prompt, params)), 0.0)
        while core.scheduler.requests.waiting or core.scheduler.requests.interactive.chunked:
            core.step()
        for _ in range(10):
            core.step()
        times, tokens = [], 0
        for _ in range(100):
            began = time.thread_time()
            outputs = core.step()
            times.append(time.thread_time() - began)
            tokens += sum(len(out.token_ids) for _, out in outputs)
        rows.append(
            {
                "steps": "with drafts" if given else "ordinary",
                "us_per_step": statistics.median(times) * 1e6,
                "us_per_token": statistics.median(times) * 1e6 * len(times) / tokens,
            }
        )
    rows[1]["ok"] = rows[1]["us_per_token"] <= rows[0]["us_per_token"]
    return rows
