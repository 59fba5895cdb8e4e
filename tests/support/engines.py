"""Workers that several schedulers use in turn, because to set up processes takes time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.grammars.model_compiler import make_grammar_compiler
from engine.llm import make_executor
from engine.loop.engine_core import EngineCore
from engine.protocol.adapters import AdapterRef
from engine.protocol.messages import AbortRequest, AddRequest
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import TokenLogprobs
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.worker.auto_config import make_worker_config
from tests.support.requests import add_request

KV_TOKENS = 1024
MAX_LEN = 256


class Engine:
    """An executor, and runs of fresh schedulers on it."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.resolved = config.resolve()
        self.executor = executor
        self._steps = 0
        self.retractions = 0
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self.embeddings: dict[int, np.ndarray] = {}
        """float32 [hidden] by prompt, of those that are pooled."""
        self.stats = SchedulerStats()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        retract_every: int = 0,
        warm: Sequence[Sequence[int]] = (),
        stop_after: dict[int, int] | None = None,
        pooling: Sequence[Pooling | None] = (),
        resumed: Sequence[Sequence[int]] = (),
        adapters: Sequence[AdapterRef | None] = (),
        kv_tokens: int = KV_TOKENS,
        flex: Sequence[int] = (),
        **scheduler: Any,
    ) -> list[list[int]]:
        """Output ids of each prompt. `warm` prompts run first, to fill the prefix cache. With
        `retract_every` n, every nth step sends a running request back to the queue. `stop_after`
        has, by prompt, the number of tokens after which the client ends it, as a stop string
        would. `pooling` has, by prompt, how it is pooled, if it is. `resumed` has, by prompt, the
        output that it had elsewhere; `adapters` has its adapter, if it has one. The scheduler uses
        `kv_tokens` of the KV cache. `flex` are the numbers of prompts whose requests are flex."""
        engine = self.config.model_copy(update=scheduler)
        resolved = engine.resolve()
        config = SchedulerConfig(resolved, kv_tokens)
        mine = SchedulerConfig(self.resolved, KV_TOKENS).windows
        assert mine is None or config.windows == mine, "other windows than the workers have"
        constrained = params if isinstance(params, Sequence) else [params]
        grammars = None
        if any(p.constraint and p.constraint.kind == "grammar" for p in constrained):
            grammars = make_grammar_compiler(resolved.model)
        sched = Scheduler(config, grammars)
        # Steps begin anew in each run: workers don't need increasing ones. Results name their step.
        core = EngineCore(sched, self.executor)
        for i, ids in enumerate(warm):
            warm = _request(-1 - i, ids, SamplingParams(max_tokens=1, temperature=0))
            core.scheduler.add(warm, core.clock())
        self._drain(core, {}, 0, {})
        out: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        self.cached, self.logprobs, self.prompt_logprobs, self.embeddings = {}, {}, {}, {}
        self.retractions = 0
        for i, ids in enumerate(prompts):
            p = params if isinstance(params, SamplingParams) else params[i]
            request = _request(i, ids, p)
            request.sequence.pooling = pooling[i] if pooling else None
            request.sequence.is_flex = i in flex
            if adapters and (adapter := adapters[i]) is not None:
                request.sequence.adapter = adapter
                request.sequence.namespace = adapter.namespace()
            if resumed and len(resumed[i]):
                request.output_ids = np.array(resumed[i], np.int32)
            core.scheduler.add(request, core.clock())
        self._drain(core, out, retract_every, stop_after or {})
        self.stats = sched.snapshot_stats()
        leak = sched.check_invariants()
        assert leak is None, leak
        assert sched.is_idle
        return [out[i] for i in range(len(prompts))]

    def _drain(
        self,
        core: EngineCore,
        out: dict[int, list[int]],
        retract_every: int,
        stop_after: dict[int, int],
    ) -> None:
        step = 0
        ended: set[int] = set()
        """Prompts that were aborted: what a step still brings of them counts for nothing."""
        while not core.scheduler.is_idle:
            step += 1
            for _, message in core.step():
                assert all(end.reason != "error" for end in message.finished), message.finished
                rids = np.repeat(message.rids, 1 if message.counts is None else message.counts)
                tokens = zip(rids.tolist(), message.token_ids, strict=True)
                for i, (rid, token) in enumerate(tokens):
                    if rid >= 0 and rid not in ended:
                        out[rid].append(token)
                        if len(out[rid]) == stop_after.get(rid):
                            core.scheduler.abort(AbortRequest(rid=rid))
                            ended.add(rid)
                        if message.logprobs and i in message.logprobs:
                            self.logprobs.setdefault(rid, []).append(message.logprobs[i])
                self.cached.update({rid: cached for rid, cached, _ in message.started})
                self.prompt_logprobs.update(message.prompt_logprobs or {})
                for rid, data in (message.embeddings or {}).items():
                    self.embeddings[rid] = np.frombuffer(data, np.float32)
            if retract_every and step % retract_every == 0:
                running = [r for m in core.scheduler.micro_batches for r in m.reqs]
                running += [r for r in core.scheduler.requests.chunked if r.pooling is not None]
                if running:
                    core.scheduler.requests.retract(running[step % len(running)])
                    self.retractions += 1


@contextmanager
def engine_for(model: Path, **config: Any) -> Iterator[Engine]:
    """An engine as `engine.LLM` has it: a worker in this process, or worker processes."""
    values: dict[str, Any] = dict(
        model=str(model),
        dtype="float32",
        cpu_threads=1,
        max_total_tokens=KV_TOKENS,
        max_model_len=MAX_LEN,
        max_running_requests=40,
        chunked_prefill_size=-1,
    )
    values.update(config)
    engine = EngineConfig(**values)
    worker = make_worker_config(engine.resolve())
    executor = make_executor(worker)
    try:
        yield Engine(engine, executor)
    finally:
        executor.shutdown()


def greedy_reference(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], max_new: int
) -> list[list[int]]:
    """transformers' greedy continuation of each prompt alone, eos ignored."""
    outs = []
    for ids in prompts:
        with torch.inference_mode():
            tensor = torch.tensor([list(ids)])
            out = model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                do_sample=False,
                max_new_tokens=max_new,
                eos_token_id=None,
                pad_token_id=0,
            )
        outs.append(out[0, len(ids) :].tolist())
    return outs


def reference_logprobs(model: transformers.PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """log_softmax float32 [len(ids), vocab] after every position."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)])).logits[0].float()
    array: np.ndarray = torch.log_softmax(logits, -1).numpy()
    return array


def reference_states(model: transformers.PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """Hidden states float32 [len(ids), hidden] behind the final norm."""
    with torch.inference_mode():
        out = model(torch.tensor([list(ids)]), output_hidden_states=True)
    array: np.ndarray = out.hidden_states[-1][0].float().numpy()
    return array


def load_reference(path: Path) -> transformers.PreTrainedModel:
    """The reference model of transformers, in float32 with eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def load_exact_reference(path: Path) -> transformers.PreTrainedModel:
    """The same in float64, for numbers that float32 rounds visibly in transformers' own code."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def _request(rid: int, ids: Sequence[int], params: SamplingParams) -> AddRequest:
    return add_request(rid=rid, input_ids=np.asarray(ids, np.int32), params=params)
