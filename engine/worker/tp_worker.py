"""`TpModelWorker`: executes step messages on one shard of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.distributed import ParallelState
from engine.messages import GenerationBatchResult, ModelWorkerBatch, PromptLogprobs
from engine.sampling import SampledTokens, Sampler, SamplingState
from engine.sampling.logprobs import LogprobTensors
from engine.worker.forward_batch import ForwardBatch
from engine.worker.future_map import FutureMap
from engine.worker.model_runner import ForwardOutput, ModelRunner
from engine.worker.worker_config import WorkerConfig


@dataclass
class PendingResult:
    """A step whose kernels are launched; `collect` waits for them and builds the message."""

    step: int
    sampled: SampledTokens
    prompt_logprobs: list[tuple[int, int, LogprobTensors]]
    """(extend row, first position, log-probabilities) of chunks whose request asked."""

    def collect(self) -> GenerationBatchResult:
        """Copy to the host. Blocks until the device is done with the step."""
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
        )


class TpModelWorker:
    """One rank: model shard, KV cache, FutureMap and sampler.

    Every rank of the last stage samples, from equal logits with noise that is a function of seed
    and position, so that no token has to be broadcast.
    """

    def __init__(self, config: WorkerConfig, parallel: ParallelState) -> None:
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
            parallel=parallel,
            load_format=config.load_format,
            seed=config.seed,
        )
        slots = config.max_running_requests + 1
        self.future_map = FutureMap(slots, self.runner.device)
        state = SamplingState(slots, config.model.vocab_size, self.runner.device)
        self.sampler = Sampler(state, config.sampling_backend)
        self._prompt_logprobs: dict[int, int] = {}
        """Slot -> alternatives, of slots whose request wants prompt log-probabilities."""

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> PendingResult | None:
        """Run one step. None on stages other than the last."""
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
            return None
        self.sampler.state.install(batch.new_slots)
        prompt = self._prompt(batch, forward, output)
        rows = batch.sample_rows
        slots_cpu = batch.req_pool_indices[rows]
        index = torch.from_numpy(rows.astype(np.int64)).to(self.runner.device)
        slots = forward.req_pool_indices.index_select(0, index)
        seq_lens = forward.seq_lens.index_select(0, index).to(torch.int64)
        sampled = self.sampler(output.logits.contiguous(), slots, slots_cpu, seq_lens)
        self.future_map.store(slots, sampled.next_token_ids)
        return PendingResult(batch.step, sampled, prompt)

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
