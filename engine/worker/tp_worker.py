"""`TpModelWorker`: executes step messages on one shard of the model."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.attention.forward_batch import ForwardBatch
from engine.config import WorkerConfig
from engine.device.clock import StepTiming
from engine.device.distributed import ParallelState
from engine.device.pinned import to_device
from engine.protocol.adapters import AdapterLoaded, AdapterRef
from engine.protocol.step import Int64Array, ModelWorkerBatch, SampleMasks
from engine.sampling.draft_check import draft_check
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.state import SamplingState
from engine.trace import StageSpan, TraceRing
from engine.worker.adapter_bank import AdapterBank
from engine.worker.base import DeviceProgress, LaunchedForward, ModelWorker, PendingResult
from engine.worker.future_map import FutureMap
from engine.worker.graphs.backend import CudaGraphBackend, GraphBackend
from engine.worker.graphs.decode_graphs import DecodeGraphs
from engine.worker.graphs.graph_check import repeats_the_model
from engine.worker.model_runner import ForwardOutput, ModelRunner
from engine.worker.sizing.estimate import stage_weight_bytes
from engine.worker.sizing.kv_sizing import MemoryMeter, agree_on_kv_tokens, check_weights_fit
from engine.worker.sizing.out_of_memory import ALLOCATE, PROFILE, WEIGHTS, out_of_memory_advice
from engine.worker.speculation import Speculation, make_speculation
from engine.worker.step_result import PromptLogprobTensors, TpPendingResult, result_tensors
from engine.worker.step_threads import StepThreads

logger = logging.getLogger(__name__)

_EAGERLY = "decodes run eagerly, which costs small models and batches most of their speed"


@dataclass
class TpLaunchedForward(LaunchedForward):
    """Logits of a step, on the device."""

    worker: TpModelWorker
    forward: ForwardBatch
    output: ForwardOutput
    prompt_logprobs: list[PromptLogprobTensors]
    graph_size: int | None
    """Size of the captured decode that made the logits, one behind each token; None if none did."""

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
        meter: MemoryMeter | None = None,
        graph_backend: GraphBackend | None = None,
    ) -> None:
        """Load the shard. `trace` gets the span of every step on this stage.

        With a `meter` the KV cache gets the memory that the device has left, or the stated size if
        that fits; without one its size must be known. `graph_backend` captures decodes; None means
        CUDA graphs on CUDA. Raises `ConfigError` with advice if the device has too little memory.
        Collective over the engine's ranks.
        """
        if meter is None and config.num_kv_tokens is None:
            raise ValueError("a KV cache of unknown size needs a meter")
        if config.device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        self.parallel = parallel
        memory = None if meter is None else meter.memory
        if memory is not None:
            check_weights_fit(stage_weight_bytes(config, parallel), config, memory)
        with out_of_memory_advice(WEIGHTS, config, memory):
            self.runner = ModelRunner(config, parallel, meter)
        self.queue = self.runner.queue
        self._threads: StepThreads | None = None
        if config.device == "cpu":
            self._threads = StepThreads(config, parallel, self.runner.kv_bytes_per_token)
        self._bank: AdapterBank | None = None
        if self.runner.adapted is not None:
            stage = config.model.stage_layers(parallel.pp_size)[parallel.pp_rank]
            self._bank = AdapterBank(
                self.runner.adapted,
                stage,
                config.model.num_layers,
                self.runner.dtype,
                self.runner.device,
                parallel.rank,
            )
            for name, folder in config.engine.lora_adapters.items():
                self._bank.check(name, Path(folder))
        self.graphs: DecodeGraphs | None = None
        self._speculation: Speculation | None = None
        self._trace: TraceRing[StageSpan] | None = None
        self._untraced: deque[tuple[int, int, StepTiming]] = deque()
        """(step, micro-batch, timing) of steps that the device may still be running."""
        self._prompt_logprobs: dict[int, int] = {}
        """Number of alternatives by row, where a request wants prompt log-probabilities."""
        with out_of_memory_advice(ALLOCATE, config, memory):
            rows = config.engine.max_running_requests + 1
            self.future_map = FutureMap(rows, self.runner.device)
            state = SamplingState(rows, config.model.vocab_size, self.runner.device)
            self.sampler = Sampler(state, config.kernels.sampling)
        # Weights and tables were made on another stream than that of the steps.
        self.queue.join()
        if meter is not None:
            self._size_kv_cache(config, meter)
            self.queue.join()
        self.num_kv_tokens = self.runner.kv_pool.num_slots
        if config.engine.speculative_config is not None and parallel.is_last_stage:
            self._speculation = make_speculation(config, parallel, self.runner, self.sampler)
        self.graphs = self._capture(config.cuda_graph_max_batch_size, graph_backend)
        for counts in self.runner.expert_counts.values():
            counts.reset()  # what was tried, measured and captured is no request's
        self.queue.join()
        self._trace = trace

    def _size_kv_cache(self, config: WorkerConfig, meter: MemoryMeter) -> None:
        runner = self.runner
        if runner.adapted is not None:
            runner.adapted.fill(0, config.engine.max_lora_rank)
        with out_of_memory_advice(PROFILE, config, meter.memory):
            profile = meter.profile(self, config, runner.cache_size)
        tokens = agree_on_kv_tokens(profile, config, self.parallel, runner.device)
        with out_of_memory_advice(ALLOCATE, config, meter.memory):
            runner.resize_kv_cache(tokens)
        # This waits until the cache is zeroed, so the first step may run on any stream.
        meter.memory.release()

    def forward(self, batch: ModelWorkerBatch) -> LaunchedForward | None:
        with self.queue.stream():
            return self._forward(batch)

    def drop_graphs(self) -> None:
        self.graphs = None

    def expert_tokens(self) -> dict[int, list[int]]:
        with self.queue.stream():
            return {layer: c.tokens() for layer, c in self.runner.expert_counts.items()}

    def load_adapter(self, adapter: AdapterRef) -> None:
        if self._bank is None:
            raise ValueError("this engine takes no adapters")
        self._bank.load(adapter)

    def take_loaded(self) -> list[AdapterLoaded]:
        return [] if self._bank is None else self._bank.take_loaded()

    @property
    def is_loading(self) -> bool:
        return self._bank is not None and self._bank.is_loading

    def drop_adapter(self, digest: str) -> None:
        if self._bank is not None:
            self._bank.drop(digest)

    def device_progress(self) -> DeviceProgress:
        return DeviceProgress(*self.queue.marks_passed())

    def sample(self, launched: TpLaunchedForward, masks: SampleMasks | None) -> PendingResult:
        """Sample a step's tokens and keep them for the next one."""
        with self.queue.stream():
            sampled = self._sample(launched, masks)
            prompt, embeddings = launched.prompt_logprobs, launched.output.embeddings
            timing = self._end(launched.batch, launched.forward)
            download = self.queue.download(result_tensors(sampled, prompt, embeddings))
            pending = TpPendingResult(
                launched.batch,
                sampled,
                prompt,
                embeddings is not None,
                download,
                timing,
                self._note_spans,
                self._speculation,
            )
            if self._speculation is not None:
                self._speculation.note(launched.batch, pending)
            return pending

    def _capture(self, max_batch_size: int, backend: GraphBackend | None) -> DecodeGraphs | None:
        device = self.runner.device
        if max_batch_size == 0 or (backend is None and device.type != "cuda"):
            return None
        if not self.runner.attention.supports_graphs:
            logger.warning(
                "%s can't be captured in CUDA graphs: %s",
                type(self.runner.attention).__name__,
                _EAGERLY,
            )
            return None
        backend = backend or CudaGraphBackend(device)
        parts = self.runner, self.sampler.state, self.future_map, backend, max_batch_size
        if self.runner.config.model.layout is None:
            return DecodeGraphs(*parts)
        try:
            graphs = DecodeGraphs(*parts)
            lack = "" if repeats_the_model(graphs, self.runner) else "its graphs give other logits"
        except (RuntimeError, ValueError) as error:
            lack = str(error).split("\n", 1)[0]
        if not lack:
            return graphs
        logger.warning(
            "%s can't be captured in CUDA graphs (%s): %s",
            self.runner.config.model.title,
            lack,
            _EAGERLY,
        )
        return None

    def _forward(self, batch: ModelWorkerBatch) -> LaunchedForward | None:
        if self._speculation is not None:
            batch = self._speculation.begin(batch)
        if batch.adapter_slots and self._bank is not None:
            self._bank.fill(batch.adapter_slots)
        for item in batch.new_rows:
            if item.params.prompt_logprobs is None:
                self._prompt_logprobs.pop(item.row, None)
            else:
                self._prompt_logprobs[item.row] = item.params.prompt_logprobs
        size = None if self.graphs is None else self.graphs.size_for(batch)
        if self.graphs is not None and size is not None:
            forward = self.graphs.prepare(batch, size)
            output = self._run_graph(self.graphs, batch, forward)
        else:
            forward = self.runner.prepare(batch)
            if self._threads is not None:
                self._threads.choose(forward)
            self.future_map.resolve(forward)
            if batch.next_prompt_ids is not None:
                forward.prompt_logits_lines = np.flatnonzero(batch.next_prompt_ids > -2).tolist()
            output = self.runner.forward(forward)
        if output is None:
            self._end(batch, forward)
            return None
        if self._speculation is not None:
            self._speculation.ran(batch, forward)
        self.sampler.state.install(batch.new_rows)
        prompt = self._prompt(batch, forward, output)
        sampled_whole = size if len(output.logits) == len(batch.input_ids) else None
        return TpLaunchedForward(batch, self, forward, output, prompt, sampled_whole)

    def _run_graph(
        self, graphs: DecodeGraphs, batch: ModelWorkerBatch, forward: ForwardBatch
    ) -> ForwardOutput | None:
        logits = graphs.forward(forward, len(batch.input_ids))
        if logits is None:
            return None
        if not np.array_equal(batch.num_sampled, batch.query_lens):
            tokens = batch.sampled_tokens(batch.line_starts())
            index = to_device(tokens, self.runner.device)
            logits = logits.index_select(0, index)
            forward.sample_rows = forward.sample_rows.index_select(0, index)
            forward.sample_lens = forward.sample_lens.index_select(0, index)
            forward.sample_rows_cpu = forward.sample_rows_cpu[tokens]
        elif batch.delayed_sample:
            # Other steps may run before this one is sampled, and all steps share a graph's memory.
            logits = logits.clone()
            forward.sample_rows = forward.sample_rows.clone()
            forward.sample_lens = forward.sample_lens.clone()
        return ForwardOutput(logits, None)

    def _sample(self, launched: TpLaunchedForward, masks: SampleMasks | None) -> SampledTokens:
        """Sample behind every token that asks for it; of each line the last valid one is kept."""
        batch, forward, logits = launched.batch, launched.forward, launched.output.logits
        count, device = len(logits), self.runner.device
        rows_cpu = forward.sample_rows_cpu[:count]
        check = draft_check(batch, device) if batch.checks_drafts else None
        is_plain = masks is None and check is None
        if self.graphs is not None and launched.graph_size is not None and is_plain:
            variant = self.graphs.variant(self.sampler.state.plan(rows_cpu))
            if variant is not None:
                return self.graphs.sample(launched.graph_size, variant, count)
        rows, seq_lens = forward.sample_rows[:count], forward.sample_lens[:count]
        mask = None
        if masks is not None and len(masks.lines):
            mask = allowed_tokens(masks, batch.run_lens, logits.shape[1], device)
        sampled = self.sampler(logits.float().contiguous(), rows, rows_cpu, seq_lens, mask, check)
        last_ids = sampled.next_token_ids
        if check is not None:
            assert sampled.num_kept is not None
            last = check.last_kept(sampled.num_kept)
            rows, last_ids = rows.index_select(0, last), last_ids.index_select(0, last)
        self.future_map.store(rows, last_ids)
        return sampled

    def _end(self, batch: ModelWorkerBatch, forward: ForwardBatch) -> StepTiming:
        """Note that the stage has launched all of a step."""
        timing = forward.timing
        if timing is None:
            raise ValueError(f"step {batch.step} ended before its forward")
        timing.end()
        if self._trace is not None:
            self._untraced.append((batch.step, batch.micro_batch, timing))
            self._note_spans()
        return timing

    def _note_spans(self) -> None:
        """Trace the steps that the device is done with."""
        while self._trace is not None and self._untraced and self._untraced[0][2].is_over():
            step, micro_batch, timing = self._untraced.popleft()
            self._trace.add(StageSpan(step, micro_batch, *timing.span()))

    def _prompt(
        self, batch: ModelWorkerBatch, forward: ForwardBatch, output: ForwardOutput
    ) -> list[PromptLogprobTensors]:
        found: list[PromptLogprobTensors] = []
        if batch.next_prompt_ids is None:
            return found
        for line in forward.prompt_logits_lines:
            logits = self.runner.prompt_logits(forward, output, line)
            first, end = forward.token_starts_cpu[line : line + 2].tolist()
            ahead = np.append(batch.input_ids[first + 1 : end], batch.next_prompt_ids[line])
            if ahead[-1] < 0:
                ahead = ahead[:-1]
            targets = to_device(ahead.astype(np.int64), self.runner.device)
            num_top = self._prompt_logprobs[int(batch.req_pool_indices[line])]
            start = int(forward.prefix_lens_cpu[line])
            logprobs = self.sampler.prompt_logprobs(logits[: len(targets)], targets, num_top)
            found.append(PromptLogprobTensors(line, start, logprobs))
        return found


def allowed_tokens(
    masks: SampleMasks, run_lens: Int64Array, vocab: int, device: torch.device
) -> Tensor:
    """bool [sum(run_lens), vocab]: what may be sampled behind each token of the S lines that sample
    behind `run_lens` [S] of them. Raises `ValueError` if the masks are for other drafts."""
    words = to_device(masks.masks.view(np.int32).copy(), device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    unpacked = (words[:, :, None] >> bits).bitwise_and_(1).bool().flatten(1)
    allowed = torch.ones((int(run_lens.sum()), vocab), dtype=torch.bool, device=device)
    places = to_device(_mask_places(masks.lines, run_lens), device)
    return allowed.index_copy_(0, places, unpacked[:, :vocab])


def _mask_places(lines: np.ndarray, run_lens: Int64Array) -> Int64Array:
    """int64 [K]: the tokens that masks of `lines` [K] are for, one for each token of a line."""
    named, first, count = np.unique(lines, return_index=True, return_counts=True)
    if not np.array_equal(count, run_lens[named]):
        raise ValueError("a step has other drafts than its masks are for")
    behind = np.arange(len(lines)) - np.repeat(first, count)
    places: Int64Array = (np.cumsum(run_lens) - run_lens)[lines] + behind
    return places
