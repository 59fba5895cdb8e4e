"""`TpModelWorker`: executes step messages on one shard of the model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.distributed import ParallelState
from engine.messages import GenerationBatchResult, ModelWorkerBatch, PromptLogprobs, SampleMasks
from engine.sampling import SampledTokens, Sampler, SamplingState
from engine.sampling.logprobs import LogprobTensors
from engine.trace import StageSpan, TraceRing
from engine.worker.base import LaunchedForward, ModelWorker, PendingResult
from engine.worker.forward_batch import ForwardBatch
from engine.worker.future_map import FutureMap
from engine.worker.model_runner import ForwardOutput, ModelRunner
from engine.worker.worker_config import WorkerConfig

_DEVICE_POLL_S = 1e-4


@dataclass
class TpPendingResult(PendingResult):
    """A step whose kernels are launched."""

    step: int
    sampled: SampledTokens
    prompt_logprobs: list[tuple[int, int, LogprobTensors]]
    """(extend row, first position, log-probabilities) of chunks whose request asked."""
    device_s: float
    done: torch.Event | None
    """Recorded behind the step's last kernel; None on CPU, where kernels run as they are called."""

    def seconds_left(self) -> float:
        return 0.0 if self.done is None or self.done.query() else _DEVICE_POLL_S

    def collect(self) -> GenerationBatchResult:
        host = self.sampled.to_host()
        errors: dict[int, str] | None = None
        if host.nan_rows.any():
            text = "the model produced NaN or no allowed token for this request"
            errors = {int(i): text for i in np.flatnonzero(host.nan_rows)}
        prompt = [
            PromptLogprobs(row, start, list(tensors.to_host()))
            for row, start, tensors in self.prompt_logprobs
        ]
        return GenerationBatchResult(
            step=self.step,
            next_token_ids=host.next_token_ids,
            logprobs=host.logprobs,
            prompt_logprobs=prompt or None,
            row_errors=errors,
            device_s=self.device_s,
        )


@dataclass
class TpLaunchedForward(LaunchedForward):
    """Logits of a step, on the device."""

    worker: TpModelWorker
    forward: ForwardBatch
    output: ForwardOutput
    prompt_logprobs: list[tuple[int, int, LogprobTensors]]

    def sample(self, masks: SampleMasks | None) -> PendingResult:
        return self.worker.sample(self, masks)


class TpModelWorker(ModelWorker):
    """One rank: model shard, KV cache, FutureMap and sampler.

    Every rank of the last stage samples, from equal logits with noise that is a function of seed
    and position, so that no token has to be broadcast.
    """

    def __init__(
        self,
        config: WorkerConfig,
        parallel: ParallelState,
        trace: TraceRing[StageSpan] | None = None,
    ) -> None:
        """Loads its shard. `trace` gets the span of every step on this stage."""
        if config.device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        self.parallel = parallel
        self.runner = ModelRunner(
            config.model,
            dtype=config.dtype,
            device=config.device,
            page_size=config.page_size,
            num_kv_slots=config.num_kv_tokens,
            max_running_requests=config.max_running_requests,
            max_model_len=config.max_model_len,
            attention_backend=config.attention_backend,
            kv_cache_dtype=config.kv_cache_dtype,
            parallel=parallel,
            load_format=config.load_format,
            seed=config.seed,
        )
        slots = config.max_running_requests + 1
        self.future_map = FutureMap(slots, self.runner.device)
        state = SamplingState(slots, config.model.vocab_size, self.runner.device)
        self.sampler = Sampler(state, config.sampling_backend)
        self._trace = trace
        self._prompt_logprobs: dict[int, int] = {}
        """Slot -> alternatives, of slots whose request wants prompt log-probabilities."""

    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward | None:
        for item in batch.new_slots:
            if item.params.prompt_logprobs is None:
                self._prompt_logprobs.pop(item.slot, None)
            else:
                self._prompt_logprobs[item.slot] = item.params.prompt_logprobs
        forward = self.runner.prepare(batch)
        self.future_map.resolve(forward)
        if batch.extend_next_ids is not None:
            forward.prompt_logits_rows = [
                i
                for i, slot in enumerate(batch.req_pool_indices[: batch.num_extend].tolist())
                if slot in self._prompt_logprobs
            ]
        output = self.runner.forward(forward)
        if output is None:
            self._record(batch, forward)
            return None
        self.sampler.state.install(batch.new_slots)
        return TpLaunchedForward(batch, self, forward, output, self._prompt(batch, forward, output))

    def sample(self, launched: TpLaunchedForward, masks: SampleMasks | None) -> PendingResult:
        """Sample a step's tokens and keep them for the next one."""
        batch, forward = launched.batch, launched.forward
        device = self.runner.device
        rows = batch.sample_rows
        slots_cpu = batch.req_pool_indices[rows]
        index = torch.from_numpy(rows.astype(np.int64)).to(device)
        slots = forward.req_pool_indices.index_select(0, index)
        seq_lens = forward.seq_lens.index_select(0, index).to(torch.int64)
        logits = launched.output.logits.contiguous()
        mask = None
        if masks is not None and len(masks.rows):
            mask = allowed_tokens(masks, logits.shape[0], logits.shape[1], device)
        sampled = self.sampler(logits, slots, slots_cpu, seq_lens, mask)
        self.future_map.store(slots, sampled.next_token_ids)
        done: torch.Event | None = None
        if device.type == "cuda":
            done = torch.Event(device)
            done.record()
        device_s = self._record(batch, forward)
        return TpPendingResult(batch.step, sampled, launched.prompt_logprobs, device_s, done)

    def _record(self, batch: ModelWorkerBatch, forward: ForwardBatch) -> float:
        """Note the stage's span of a step; its length in seconds.

        On CUDA that is the time of launching it.
        """
        end = time.monotonic()
        if self._trace is not None:
            self._trace.add(StageSpan(batch.step, batch.micro_batch, forward.started_at, end))
        return end - forward.started_at

    def _prompt(
        self, batch: ModelWorkerBatch, forward: ForwardBatch, output: ForwardOutput
    ) -> list[tuple[int, int, LogprobTensors]]:
        found: list[tuple[int, int, LogprobTensors]] = []
        if batch.extend_next_ids is None:
            return found
        for row in forward.prompt_logits_rows:
            logits = self.runner.prompt_logits(forward, output, row)
            first, end = forward.token_starts_cpu[row : row + 2].tolist()
            ahead = np.append(batch.input_ids[first + 1 : end], batch.extend_next_ids[row])
            if ahead[-1] < 0:
                ahead = ahead[:-1]
            targets = torch.from_numpy(ahead.astype(np.int64)).to(self.runner.device)
            num_top = self._prompt_logprobs[int(batch.req_pool_indices[row])]
            start = int(forward.prefix_lens_cpu[row])
            found.append(
                (
                    row,
                    start,
                    self.sampler.prompt_logprobs(logits[: len(targets)], targets, num_top),
                )
            )
        return found


def allowed_tokens(masks: SampleMasks, num_rows: int, vocab: int, device: torch.device) -> Tensor:
    """bool [num_rows, vocab]: the tokens that each sampled row may take."""
    words = torch.from_numpy(masks.masks.view(np.int32).copy()).to(device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    unpacked = (words[:, :, None] >> bits).bitwise_and_(1).bool().flatten(1)
    allowed = torch.ones((num_rows, vocab), dtype=torch.bool, device=device)
    rows = torch.from_numpy(masks.rows.astype(np.int64)).to(device)
    return allowed.index_copy_(0, rows, unpacked[:, :vocab])
