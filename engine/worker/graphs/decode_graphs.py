"""Decode steps as captured graphs: one for the model's forward, one for each way to sample.

The host needs longer to launch a decode's kernels one by one than the device needs to run them; a
graph is one launch. It replays the same kernels on the same memory, so there is one per batch size,
and a batch is padded to the next size that was captured. Short chunks of prompts run in the same
graphs, each token as a line; other prefills and mixed steps run eagerly.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.forward_batch import ForwardBatch, step_inputs
from engine.device.adapter_rows import AdapterRows
from engine.errors import ConfigError
from engine.memory_need import GRAPH_RESERVE_BYTES
from engine.protocol.step import ModelWorkerBatch
from engine.registry import SAMPLING_BACKENDS
from engine.sampling.base import SamplingBackend
from engine.sampling.features.draw import Draw, DrawPlan
from engine.sampling.line_group import LineGroup
from engine.sampling.sampler import SampledTokens
from engine.sampling.state import SamplingPlan, SamplingState
from engine.worker.future_map import FutureMap
from engine.worker.graphs.backend import GraphBackend
from engine.worker.graphs.buffers import GraphBuffers, GraphInputs, GraphOutputs
from engine.worker.graphs.sizes import (
    capture_order,
    graph_sizes,
    nothing_but_padding,
    pad_decodes,
    runs_as_decodes,
    smallest_fitting,
)
from engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

CAPTURE_MAX_SECONDS = 180.0
KEEP_FREE_BYTES = 512 << 20
"""Device memory that captures leave for the activations of prefills."""
_LOG_EVERY_S = 10.0


class Variant(Enum):
    """A way to sample for which there is a graph."""

    GREEDY = "greedy"
    """All rows take the likeliest token."""
    DRAW = "draw"
    """Rows take the likeliest token or draw from the whole vocabulary. If the sampling backend
    ignores plans, they may draw in any way, and there is one graph for both variants."""


class CaptureLimits(NamedTuple):
    """Capturing stops after the size that exceeds one of these."""

    num_bytes: int = GRAPH_RESERVE_BYTES
    seconds: float = CAPTURE_MAX_SECONDS
    keep_free_bytes: int = KEEP_FREE_BYTES


@dataclass
class _Graph:
    """The captured graphs of one batch size."""

    size: int
    inputs: GraphInputs
    outputs: GraphOutputs
    forward: Callable[[], None]
    adapted: Callable[[], None] | None
    """The same with adapters: their slots are inputs. None where requests have none."""
    sample: dict[Variant, Callable[[], None]]


class DecodeGraphs:
    """The captured decodes of one worker. Two graphs are chained,

        inputs -> [take last tokens, forward] -> logits -> [sample, keep last tokens] -> tokens

    because the way to sample differs from step to step: greedy lines only, or lines that also draw
    (with torch's operators only from the whole vocabulary). Lines with other needs (penalties,
    masks, log-probabilities, ...) are sampled eagerly from the same logits. So are lines that check
    drafts, each token of which runs as a line of its own.
    """

    def __init__(
        self,
        runner: ModelRunner,
        state: SamplingState,
        future_map: FutureMap,
        backend: GraphBackend,
        max_batch_size: int,
        limits: CaptureLimits | None = None,
    ) -> None:
        """Capture the graphs. Every rank of an engine must do so at the same time.

        Raises `ConfigError` if there is no memory for the largest size, which comes first.
        """
        self.runner = runner
        self._state = state
        self._future_map = future_map
        self._backend = backend
        # Not the worker's own sampler: a larger working memory may replace that one's.
        word = "triton" if runner.config.kernels.sampling == "triton" else "torch"
        self._sampling: SamplingBackend = SAMPLING_BACKENDS[word](state.draw)
        self._graphs: dict[int, _Graph] = {}
        try:
            dtype = runner.dtype if self._sampling.takes_half else torch.float32
            self._buffers = GraphBuffers(runner, max_batch_size, dtype)
            runner.queue.join()
            with runner.queue.stream():
                self._capture_all(limits or CaptureLimits())
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"no memory left to capture CUDA graphs of {max_batch_size} rows: lower "
                "memory_fraction, max_total_tokens or cuda_graph_max_batch_size, or set "
                "enable_cuda_graphs: false."
            ) from error

    @property
    def sizes(self) -> list[int]:
        """Captured batch sizes, ascending."""
        return sorted(self._graphs)

    def size_for(self, batch: ModelWorkerBatch) -> int | None:
        """The captured size that `batch` can run with; None: it must run eagerly."""
        tokens = len(batch.input_ids)
        size = smallest_fitting(self._graphs, tokens) if tokens else None
        return size if size is not None and runs_as_decodes(batch) else None

    def variant(self, plan: SamplingPlan) -> Variant | None:
        """How a graph samples rows with this plan; None: they are sampled eagerly."""
        fits = plan.only_draws if self._sampling.ignores_plan else plan.is_plain
        if not fits:
            return None
        return Variant.GREEDY if plan.draw.is_greedy else Variant.DRAW

    def prepare(self, batch: ModelWorkerBatch, size: int) -> ForwardBatch:
        """`ModelRunner.prepare` for a graph of `size_for(batch)`: writes the padded batch to the
        memory that the graph reads."""
        graph = self._graphs[size]
        self.runner.change_windows(batch)
        self.runner.write_prefixes(batch)
        padded = pad_decodes(batch, size)
        return self._load(padded, graph.inputs)

    @torch.inference_mode()
    def forward(self, prepared: ForwardBatch, num_rows: int) -> Tensor | None:
        """Launch the stage's forward. Returns logits [num_rows, vocab], behind each token, on the
        last stage, else None.

        The next forward overwrites the logits. `prepared` is the result of `prepare`; its first
        `num_rows` rows are real.
        """
        runner = self.runner
        graph = self._graphs[prepared.batch_size]
        if graph.outputs.hidden_in is not None:
            received = runner.parallel.recv_hidden(
                num_rows, runner.config.model.hidden_size, runner.dtype, runner.device
            )
            graph.outputs.hidden_in[:num_rows].copy_(received)
        prepared.timing = runner.queue.begin()
        runner.attention.plan_graph(prepared)
        launch = graph.forward if prepared.adapters is None else graph.adapted
        if launch is None:
            raise ValueError("no graph was captured for lines with adapters")
        launch()
        if graph.outputs.hidden_out is not None:
            # A copy: the transfer may outlast the next forward's start.
            runner.parallel.send_hidden(graph.outputs.hidden_out[:num_rows].clone())
        return None if graph.outputs.logits is None else graph.outputs.logits[:num_rows]

    def sample(self, size: int, variant: Variant, num_rows: int) -> SampledTokens:
        """Launch the sampling of the first `num_rows` of the last forward's logits.

        The next sampling overwrites the results.
        """
        graph = self._graphs[size]
        token_ids, is_nan = graph.outputs.token_ids, graph.outputs.is_nan
        if token_ids is None or is_nan is None:
            raise ValueError("only the last pipeline stage samples")
        self.runner.queue.protect_downloads()
        graph.sample[variant]()
        return SampledTokens(token_ids[:num_rows], is_nan[:num_rows], None, None)

    def _load(self, padded: ModelWorkerBatch, inputs: GraphInputs) -> ForwardBatch:
        starts = padded.line_starts()
        host = step_inputs(padded, starts)
        self._buffers.write(host, self.runner.table_update(padded, host), padded.adapters)
        self.runner.write_table(inputs.cells, inputs.locs)
        batch = ForwardBatch.on_device(padded, host, inputs.step, starts)
        if padded.adapters is not None and inputs.adapters is not None:
            batch.adapters = AdapterRows(padded.adapters, inputs.adapters, is_captured=True)
        return batch

    @torch.inference_mode()
    def _capture_all(self, limits: CaptureLimits) -> None:
        sizes = graph_sizes(self._buffers.max_size)
        self.runner.attention.init_graphs(sizes)
        free = self._backend.free_bytes()
        started = time.monotonic()
        for size in self._with_progress(capture_order(sizes)):
            self._graphs[size] = self._capture(size)
            left = self._backend.free_bytes()
            seconds = time.monotonic() - started
            exceeded = (
                free - left > limits.num_bytes
                or left < limits.keep_free_bytes
                or seconds > limits.seconds
            )
            # All ranks go on or none: the next capture runs their collectives.
            if self._anywhere(exceeded) and len(self._graphs) < len(sizes):
                logger.warning(
                    "capturing CUDA graphs stopped after %d of %d batch sizes (%.0f s, %d MiB, %d "
                    "MiB left); batches of the others are padded further or run eagerly",
                    len(self._graphs),
                    len(sizes),
                    seconds,
                    (free - left) >> 20,
                    left >> 20,
                )
                return
        logger.info(
            "captured CUDA graphs of %d batch sizes up to %d in %.1f s, %d MiB",
            len(sizes),
            sizes[-1],
            time.monotonic() - started,
            (free - self._backend.free_bytes()) >> 20,
        )

    def _with_progress(self, sizes: list[int]) -> Iterator[int]:
        first_rank = self.runner.parallel.rank == 0
        on_terminal = first_rank and sys.stderr.isatty()
        noted = time.monotonic()
        bar = tqdm(sizes, "CUDA graphs", disable=not on_terminal, file=sys.stderr, unit="size")
        for done, size in enumerate(bar):
            if first_rank and not on_terminal and time.monotonic() - noted > _LOG_EVERY_S:
                noted = time.monotonic()
                logger.info("capturing CUDA graphs: %d of %d batch sizes", done, len(sizes))
            yield size

    def _capture(self, size: int) -> _Graph:
        inputs = self._buffers.inputs(size)
        outputs = self._buffers.outputs(size)
        batch = self._load(nothing_but_padding(size), inputs)
        self.runner.attention.plan_graph(batch)
        adapted = None
        if self.runner.adapted is not None:  # it comes first, as it takes more memory
            padding = nothing_but_padding(size)
            padding.adapters = np.full(size, -1, np.int32)
            with_adapters = self._load(padding, inputs)
            adapted = self._backend.capture(lambda: self._run_forward(with_adapters, outputs))
        forward = self._backend.capture(lambda: self._run_forward(batch, outputs))
        sample: dict[Variant, Callable[[], None]] = {}
        if outputs.logits is not None:
            if self._sampling.ignores_plan:
                draw = self._backend.capture(self._sampler(batch, outputs, Variant.DRAW))
                sample = dict.fromkeys(Variant, draw)
            else:
                for variant in reversed(Variant):  # DRAW takes more memory
                    sample[variant] = self._backend.capture(self._sampler(batch, outputs, variant))
        return _Graph(size, inputs, outputs, forward, adapted, sample)

    def _run_forward(self, batch: ForwardBatch, outputs: GraphOutputs) -> None:
        model = self.runner.model
        batch.window_loc = None  # found by the graph itself, not before it is captured
        self._future_map.resolve(batch)
        if self.runner.adapted is not None:
            self.runner.adapted.step.begin(batch.adapters)
        hidden = model.forward(batch, self.runner.attention, outputs.hidden_in)
        if outputs.hidden_out is not None:
            outputs.hidden_out.copy_(hidden)
        if outputs.logits is not None:
            outputs.logits.copy_(model.compute_logits(hidden))

    def _sampler(
        self, batch: ForwardBatch, outputs: GraphOutputs, variant: Variant
    ) -> Callable[[], None]:
        logits, token_ids, is_nan = outputs.logits, outputs.token_ids, outputs.is_nan
        if logits is None or token_ids is None or is_nan is None:
            raise ValueError("only the last pipeline stage samples")
        rows, positions = batch.sample_rows, batch.sample_lens
        everything = LineGroup(None, batch.batch_size)
        greedy, full = (DrawPlan({kind: everything}) for kind in (Draw.GREEDY, Draw.FULL))

        def run() -> None:
            ids, max_logit = self._sampling.sample(logits, greedy, rows, positions)
            if variant is Variant.DRAW and not self._sampling.ignores_plan:
                drawn, max_logit = self._sampling.sample(logits, full, rows, positions)
                ids = torch.where(self._state.draw.greedy(rows), ids, drawn)
            token_ids.copy_(ids)
            is_nan.copy_((max_logit - max_logit).isnan())
            self._future_map.store(rows, token_ids)

        return run

    def _anywhere(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank that captures with this one. Waits for the device."""
        count = torch.tensor([int(flag)], dtype=torch.int32, device=self.runner.device)
        return bool(self.runner.parallel.all_reduce(count).item())
