"""`SimulatedWorker`: a stage that takes a set time and computes nothing.

It serves to measure the scheduler, the messages and the actors at the speed of a GPU without one
(`device: simulated`).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.forward_batch import step_inputs
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.protocol.adapters import AdapterLoaded, AdapterRef
from engine.protocol.step import GenerationBatchResult, IntArray, ModelWorkerBatch, SampleMasks
from engine.speculative.step_filler import StepFiller
from engine.trace import StageSpan, TraceRing
from engine.worker.base import DeviceProgress, LaunchedForward, ModelWorker, PendingResult
from engine.worker.simulated_drafts import SimulatedDrafter
from engine.worker.simulated_script import ScriptedReplies


@dataclass
class SimulatedResult(PendingResult):
    """A step that ends on the timeline at `ready_at`, monotonic seconds."""

    result: GenerationBatchResult
    ready_at: float

    def seconds_left(self) -> float:
        return max(0.0, self.ready_at - time.monotonic())

    def collect(self) -> GenerationBatchResult:
        if (left := self.seconds_left()) > 0.0:  # a sleep of 0 s takes 55 us
            time.sleep(left)
        return self.result


@dataclass
class SimulatedForward(LaunchedForward):
    """A step on the timeline."""

    worker: SimulatedWorker
    last_ids: IntArray
    """int32 [S']: the token before each sampled one. A line that checks drafts samples several."""
    ready_at: float
    device_s: float

    def sample(self, masks: SampleMasks | None) -> PendingResult:
        runs, errors = self.worker.next_tokens(self, masks)
        # A delayed sample starts when its masks are here.
        ready_at = self.ready_at if masks is None else max(self.ready_at, time.monotonic())
        batch = self.batch
        result = GenerationBatchResult(
            batch.step,
            [token for run in runs for token in run],
            line_errors=errors or None,
            device_s=self.device_s,
            period_s=self.device_s,
            embeddings=None if batch.pooled is None else self.worker.embeddings(batch),
        )
        if batch.checks_drafts:
            result.num_tokens = [len(run) for run in runs]
            result.num_drafts = (batch.run_lens - 1).tolist()
        if (filler := self.worker.filler) is not None:
            filler.record(batch, filler.owners(batch), runs)
            if batch.drafts_wanted:
                rows = batch.req_pool_indices[batch.sampled_lines].tolist()
                result.drafts = filler.propose(rows, [batch.drafts_wanted] * len(rows))
        return SimulatedResult(result, ready_at)


class SimulatedWorker(ModelWorker):
    """One stage of the simulated pipeline; tensor parallel ranks each keep the same timeline.

    The device is a timeline, like a CUDA stream. A step starts when its message is here, the device
    has done the steps before it and the previous stage has handed over; launching never blocks. The
    hand-over between stages is a real message of the pipeline's process group. It is sent at launch
    and holds the time at which the hidden states will be there, because the device, not the CPU,
    orders NCCL's transfers.

    Tokens are a hash of the token before and its position: the same in any batch, on any replica
    and after any interruption, like a model's greedy tokens. So are embeddings, of the prompt's
    last token. With `script_token_id` outputs stand in their prompts instead.
    """

    def __init__(
        self, config: WorkerConfig, parallel: ParallelState, trace: TraceRing[StageSpan]
    ) -> None:
        self.device = config.engine.simulated
        self.parallel = parallel
        self.num_kv_tokens = config.num_kv_tokens or config.max_kv_tokens
        self._trace = trace
        self._free_at = 0.0
        self._last = np.full(config.engine.max_running_requests + 1, -1, np.int32)
        """The token that each row sampled last (what `FutureMap` is on a real device)."""
        ids = np.arange(config.model.vocab_size, dtype=np.int32)
        self._ordinary = ids[~np.isin(ids, config.model.eos_token_ids)]
        self._hidden_size = config.model.hidden_size
        self._loaded: list[AdapterLoaded] = []
        self._scripts: ScriptedReplies | None = None
        if self.device.script_token_id is not None:
            end = config.model.eos_token_ids[0]
            self._scripts = ScriptedReplies(self.device.script_token_id, end)
        self.filler: StepFiller | None = None
        """Set if the engine speculates."""
        if config.engine.speculative_config is not None and parallel.is_last_stage:
            rows = config.engine.max_running_requests + 1
            acceptance = self.device.draft_acceptance
            drafter = SimulatedDrafter(
                config.engine.speculative_config, rows, acceptance, self._follow
            )
            agree = parallel.check_equal if parallel.tp_size > 1 else None
            self.filler = StepFiller(drafter, rows, agree)

    def load_adapter(self, adapter: AdapterRef) -> None:
        """It is there at once, and changes nothing."""
        self._loaded.append(AdapterLoaded(self.parallel.rank, adapter.digest))

    def take_loaded(self) -> list[AdapterLoaded]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward | None:
        if self.filler is not None:
            batch = self._complete(self.filler, batch)
        arrived = time.monotonic()
        if not self.parallel.is_first_stage:
            arrived = max(arrived, self._receive())
        cost = self.device.seconds(len(batch.input_ids), int(batch.seq_lens.sum()))
        start = max(arrived, self._free_at)
        self._free_at = start + cost
        self._trace.add(StageSpan(batch.step, batch.micro_batch, start, self._free_at))
        if not self.parallel.is_last_stage:
            self._hand_over(self._free_at + self.device.transfer_ms / 1e3)
            return None
        if self._scripts is not None:
            self._scripts.read(batch)
        inputs = step_inputs(batch)
        sampled = len(inputs.logits_rows) - (0 if batch.pooled is None else len(batch.pooled.last))
        last_ids = batch.input_ids[inputs.logits_rows[:sampled]]
        known = self._last[inputs.sample_rows[:sampled]]
        last_ids = np.where(last_ids < 0, known, last_ids)
        return SimulatedForward(batch, self, last_ids, self._free_at, cost)

    def next_tokens(
        self, forward: SimulatedForward, masks: SampleMasks | None
    ) -> tuple[list[list[int]], dict[int, str]]:
        """Tokens of each of the S lines, and errors by line. The last ones are kept for the next
        step."""
        batch = forward.batch
        lines = batch.sampled_lines
        rows, counts = batch.req_pool_indices[lines], batch.num_sampled[lines].astype(np.int64)
        lens = batch.seq_lens[lines].astype(np.int64)
        ends = np.cumsum(counts)
        behind = np.repeat(ends, counts) - 1 - np.arange(len(forward.last_ids))
        places = np.repeat(lens, counts) - behind
        mixed = hash_tokens(forward.last_ids, places.astype(np.uint64))
        tokens = self._ordinary[mixed % np.uint64(len(self._ordinary))]
        if self._scripts is not None:
            tokens = self._scripts.tokens(np.repeat(rows, counts), places)
        firsts = ends - counts
        errors: dict[int, str] = {}
        if masks is not None:
            bits = np.unpackbits(masks.masks.view(np.uint8), axis=1, bitorder="little")
            seen: Counter[int] = Counter()
            for line, allowed in zip(masks.lines.tolist(), bits, strict=True):
                ids, place = np.flatnonzero(allowed), firsts[line] + seen[line]
                seen[line] += 1
                if len(ids) == 0:
                    errors[line] = "no token is allowed for this request"
                else:
                    tokens[place] = ids[int(mixed[place]) % len(ids)]
        # A token counts if all drafts before it, which are the inputs, are what was sampled.
        follows = np.append(forward.last_ids[1:], -1) == tokens
        follows[ends - 1] = False
        wrong = np.flatnonzero(~follows)
        last = wrong[np.searchsorted(wrong, firsts)]
        self._last[rows] = tokens[last]
        found = tokens.tolist()
        spans = zip(firsts.tolist(), (last + 1).tolist(), strict=True)
        return [found[start:end] for start, end in spans], errors

    def device_progress(self) -> DeviceProgress:
        now = time.monotonic()
        return DeviceProgress(min(now, self._free_at), now < self._free_at)

    def _follow(self, tokens: np.ndarray, positions: np.ndarray) -> IntArray:
        mixed = hash_tokens(tokens, positions.astype(np.uint64))
        return self._ordinary[mixed % np.uint64(len(self._ordinary))]

    def _complete(self, filler: StepFiller, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """The step with its drafts, made when the tokens that they depend on are there."""
        filler.install(batch.new_rows)
        if batch.late is not None and self.device.drafts_on == "host":
            left = self._free_at - time.monotonic()
            if left > 0.0:
                time.sleep(left)
        return filler.fill(batch)

    def embeddings(self, batch: ModelWorkerBatch) -> list[bytes]:
        """The embeddings that a step with pooled rows completes, with numbers from -0.5 to 0.5."""
        assert batch.pooled is not None
        lines = np.concatenate([batch.pooled.last, batch.pooled.mean_ends])
        last_ids = batch.input_ids[batch.line_starts()[1:][lines] - 1]
        ends = hash_tokens(last_ids, batch.seq_lens[lines].astype(np.uint64))
        numbers = np.arange(self._hidden_size, dtype=np.uint64)
        mixed = hash_tokens(numbers, ends[:, None])
        vectors = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
        return [vector.tobytes() for vector in vectors.astype("<f4")]

    def _receive(self) -> float:
        tensor = self.parallel.recv_hidden(1, 1, torch.float64, torch.device("cpu"))
        return float(tensor.item())

    def _hand_over(self, ready_at: float) -> None:
        self.parallel.send_hidden(torch.tensor([[ready_at]], dtype=torch.float64))


def hash_tokens(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [N] from tokens [N] and positions uint64 [N] (SplitMix64's finaliser)."""
    x = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
