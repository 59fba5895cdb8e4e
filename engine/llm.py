"""`LLM`: offline generation in one process, with the classes that the server runs."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.config import EngineConfig, WorkerConfig, load_config
from engine.constraints.guard import GrammarGuard
from engine.errors import ConfigError, EngineDeadError, RequestError
from engine.executor.base import Executor
from engine.executor.in_process import InProcessExecutor
from engine.executor.worker_thread import ThreadExecutor
from engine.grammars.model_compiler import make_grammar_compiler
from engine.loop.engine_core import EngineCore
from engine.process.interrupts import HeldInterrupts
from engine.protocol.adapters import AdapterRef
from engine.protocol.messages import AbortRequest, AddRequest, StepOutputs
from engine.protocol.pooling import (
    FloatArray,
    Pooling,
    check_dimensions,
    check_pooling,
    read_embedding,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import LogprobEntry, Register, TextDelta
from engine.scheduler.admission import verify_prompt
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.tokenizer.detokenizer_manager import DetokenizerManager
from engine.tokenizer.tokenizer import Tokenizer
from engine.trace import chrome_trace, scheduler_trace, stage_trace
from engine.worker.auto_config import make_worker_config


@dataclass
class CompletionOutput:
    """One finished sequence. `token_ids` include the eos or stop token that ended it."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[LogprobEntry] = field(default_factory=list)


@dataclass
class RequestOutput:
    """A prompt and the `n` sequences generated for it.

    `num_cached_tokens` tokens of the prompt came from the prefix cache (for the first sequence).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobEntry | None] | None = None


@dataclass
class EmbeddingOutput:
    """A prompt and its `embedding`, float32 [dimensions, or hidden size].

    `num_cached_tokens` tokens of the prompt came from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: FloatArray
    num_cached_tokens: int = 0


Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""A text, or token ids. An array or a tensor of two dimensions is several prompts."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Arrays and tensors of ids become lists. Raises `RequestError` on other things."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    try:
        given = [_plain(prompt) for prompt in prompts]
    except TypeError:
        raise RequestError(f"a prompt is a text or token ids, not {prompts!r}", "prompt") from None
    if given and all(type(token) is int for token in given):
        return [given]
    for prompt in given:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and all(type(token) is int for token in prompt)
        ):
            raise RequestError("a prompt is a text or whole numbers, its token ids", "prompt")
    return given


def _plain(value: Any) -> Any:
    """Arrays of numpy and tensors of torch as lists or numbers, and what holds them too."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class _Running(NamedTuple):
    """A sequence under way, and the result that it belongs to."""

    result: RequestOutput
    sequence: CompletionOutput


class LLM:
    """A model ready to generate.

    Keyword arguments are the keys of docs/configuration.md, e.g. `LLM("path", tp_size=2)`.
    Raises `ConfigError` when the model or a key can't be served. Use as a context manager, or
    call `shutdown`, to stop the workers: one thread on CPU, or the processes of several ranks.
    """

    def __init__(self, model: str = "models/manta-small", **config: Any) -> None:
        self.config = load_config(EngineConfig, {"model": model, **config})
        resolved = self.config.resolve()
        worker = make_worker_config(resolved)
        if worker.num_kv_tokens is not None:
            # Raises on impossible sizes, before any weight is read.
            SchedulerConfig(resolved, worker.num_kv_tokens)
        self.tokenizer = _load_tokenizer(resolved.model.path)
        self.vocab_size = resolved.model.vocab_size
        self.max_model_len = resolved.max_model_len
        self._sampling_defaults: dict[str, Any] = self.config.sampling_defaults(resolved.model)
        self._hidden_size = resolved.model.hidden_size
        self._pooling = resolved.pooling
        executor = make_executor(worker)
        grammars = make_grammar_compiler(resolved.model) if self.tokenizer else None
        scheduler_config = SchedulerConfig(resolved, executor.num_kv_tokens)
        scheduler = Scheduler(scheduler_config, grammars)
        self._guard = GrammarGuard(resolved.model.path) if self.tokenizer else None
        self.core = EngineCore(scheduler, executor)
        self._adapters = AdapterCatalog.of(self.config)
        self._rng = random.Random()
        self._next_rid = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids). Returns outputs in the order of `prompts`.

        `lora`: names of adapters, one for all or one per prompt (None: the model as it is); see
        `lora_adapters` and `lora_folder`. `sampling_params` is one for all or one per prompt.
        Raises `RequestError` for the first prompt or parameter that can't be served, before
        anything runs. Ctrl-C ends it after the steps that run (`HeldInterrupts`); the object can be
        used afterwards.
        """
        texts, batch = self._encode(prompts)
        params = self._per_prompt(sampling_params, len(batch))
        return self._run(texts, batch, params, use_tqdm, self._adapters_of(lora, len(batch)))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """One vector for each prompt (texts or token ids), in their order.

        `pooling` None: what the configuration says. The vector is cut to `dimensions`; then, with
        `normalize`, its length is made 1. Errors and Ctrl-C are as in `generate`, but a prompt may
        take the whole context.
        """
        chosen = self._pooling if pooling is None else pooling
        check_pooling(chosen)
        check_dimensions(dimensions, self._hidden_size)
        texts, batch = self._encode(prompts)
        for ids in batch:
            self._verify_prompt(ids, chosen)
        nothing = np.zeros(0, np.float32)
        results = [EmbeddingOutput(t, ids, nothing) for t, ids in zip(texts, batch, strict=True)]
        first = self._next_rid
        self._next_rid += len(results)

        def read(out: StepOutputs) -> list[int]:
            for end in out.finished:
                if end.reason == "error":
                    raise RequestError(end.message, end.param, status=end.status or 500)
                data = (out.embeddings or {})[end.rid]
                result = results[end.rid - first]
                result.embedding = read_embedding(data, dimensions, normalize=normalize)
                result.num_cached_tokens = end.num_cached
            return [end.rid for end in out.finished]

        params = SamplingParams(temperature=0.0)
        requests = [
            AddRequest(
                rid=rid, sequence=TokenSequence(np.asarray(ids, np.int32), params, pooling=chosen)
            )
            for rid, ids in enumerate(batch, first)
        ]
        self._drive(requests, read, use_tqdm)
        return results

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several (lists of {"role", "content"})."""
        if self.tokenizer is None:
            raise RequestError("the model folder has no tokenizer: use generate with token ids")
        many = messages if messages and isinstance(messages[0], list) else [messages]
        batch = [
            self.tokenizer.apply_chat_template(
                m,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
            )
            for m in many
        ]
        params = self._per_prompt(sampling_params, len(batch))
        return self._run([None] * len(batch), batch, params, use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use without `sampling_params`: Manta's defaults, with those
        that the model's generation_config.json sets."""
        return SamplingParams(**self._sampling_defaults)

    def trace(self) -> dict[str, Any]:
        """Chrome trace (for json.dump; Perfetto opens it) of the last steps.

        Stages are in it if they run in this process (tp_size = pp_size = 1).
        """
        roles = [scheduler_trace(self.core.trace)]
        if isinstance(self.core.executor, InProcessExecutor | ThreadExecutor):
            roles.append(stage_trace(0, 0, self.core.executor.trace))
        return chrome_trace({"engine": roles})

    def expert_tokens(self) -> dict[int, list[int]]:
        """By decoder layer: how many tokens each of its experts got. {} unless
        `enable_expert_metrics` is set. Of several ranks it may lack the last second's."""
        if not self.core.scheduler.num_in_flight:
            self.core.executor.wait(0.0)  # takes reports that have come
        return self.core.executor.expert_tokens()

    def shutdown(self) -> None:
        """Stop the workers; the object can't be used afterwards."""
        self.core.shutdown()
        if self._guard is not None:
            self._guard.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _run(
        self,
        texts: list[str | None],
        prompts: list[list[int]],
        params: list[SamplingParams],
        use_tqdm: bool,
        adapters: Sequence[AdapterRef | None] | None = None,
    ) -> list[RequestOutput]:
        for ids, p in zip(prompts, params, strict=True):
            p.verify(self.vocab_size)
            if p.thinking is not None and self.tokenizer is None:
                raise RequestError("thinking needs the model's tokenizer", "thinking")
            if p.constraint is not None and self._guard is not None:
                self._guard.check(p.constraint)
            self._verify_prompt(ids)
        detokenizer = DetokenizerManager(self.tokenizer) if self.tokenizer else None
        results = [
            RequestOutput(text, ids, [CompletionOutput(i) for i in range(p.n)])
            for text, ids, p in zip(texts, prompts, params, strict=True)
        ]
        chosen = [None] * len(prompts) if adapters is None else adapters
        running, requests = self._sequences(results, params, chosen, detokenizer)
        self._drive(requests, lambda out: self._absorb(out, detokenizer, running), use_tqdm)
        return results

    def _drive(
        self,
        requests: list[AddRequest],
        read: Callable[[StepOutputs], list[int]],
        use_tqdm: bool,
    ) -> None:
        """Run the requests to their ends. `read` takes what a step gave and returns the rids that
        ended. Whatever ends this, no request is left."""
        scheduler = self.core.scheduler
        limit = scheduler.config.engine.max_queued_requests
        if scheduler.num_in_flight and not self.core.process_one():
            raise EngineDeadError("an interruption lost a step; make a new LLM")
        with HeldInterrupts() as interrupts:
            pending = iter(requests)
            open_rids = {request.rid for request in requests}
            bar = tqdm(
                total=len(requests),
                disable=not use_tqdm,
                unit="seq",
                file=sys.stderr,
                dynamic_ncols=True,
            )
            try:
                with bar:
                    while open_rids:
                        interrupts.let_in()
                        room = max(0, limit - len(scheduler.requests.waiting))
                        for request in itertools.islice(pending, room):
                            scheduler.add(request, self.core.clock())
                        for _, out in self.core.step():
                            for rid in read(out):
                                open_rids.discard(rid)
                                bar.update(1)
            finally:
                # Interrupted: end the requests that still run.
                for rid in open_rids:
                    scheduler.abort(AbortRequest(rid=rid))
                self._finish_steps()

    def _encode(
        self, prompts: Prompt | Sequence[Prompt]
    ) -> tuple[list[str | None], list[list[int]]]:
        """Texts, None for those given as token ids, and the token ids of all."""
        texts: list[str | None] = []
        batch: list[list[int]] = []
        for prompt in as_list(prompts):
            if not isinstance(prompt, str):
                texts.append(None)
                batch.append(list(prompt))
            elif self.tokenizer is None:
                raise RequestError("the model folder has no tokenizer: pass token ids", "prompt")
            else:
                texts.append(prompt)
                batch.append(self.tokenizer.encode(prompt))
        return texts, batch

    def _verify_prompt(self, ids: list[int], pooling: Pooling | None = None) -> None:
        # int64: an id beyond 32 bits must be refused, not wrapped around.
        array = np.asarray(ids, np.int64)
        verify_prompt(array, self.max_model_len, self.vocab_size, pooling)

    def _sequences(
        self,
        results: list[RequestOutput],
        params: list[SamplingParams],
        adapters: Sequence[AdapterRef | None],
        detokenizer: DetokenizerManager | None,
    ) -> tuple[dict[int, _Running], list[AddRequest]]:
        """A request for every sequence of the results, and the sequences by rid."""
        running: dict[int, _Running] = {}
        requests: list[AddRequest] = []
        for result, p, adapter in zip(results, params, adapters, strict=True):
            ids = result.prompt_token_ids
            namespace = "" if adapter is None else adapter.namespace()
            for sequence, copy in zip(
                result.outputs, p.copies(lambda: self._rng.getrandbits(63)), strict=True
            ):
                rid = self._next_rid
                self._next_rid += 1
                running[rid] = _Running(result, sequence)
                if detokenizer is not None:
                    detokenizer.add(Register(0, "", rid, copy, len(ids), ids, [], True))
                tokens = TokenSequence(
                    np.asarray(ids, np.int32), copy, namespace=namespace, adapter=adapter
                )
                requests.append(AddRequest(rid=rid, sequence=tokens))
        return running, requests

    def _adapters_of(
        self, lora: str | Sequence[str | None] | None, count: int
    ) -> list[AdapterRef | None]:
        names = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != count:
            raise RequestError(f"{len(names)} names of adapters for {count} prompts", "lora")
        found: dict[str | None, AdapterRef | None] = {None: None}
        for name in names:
            if name not in found:
                found[name] = self._adapter(name)
        return [found[name] for name in names]

    def _adapter(self, name: str | None) -> AdapterRef | None:
        if self._adapters is None:
            raise RequestError("this engine has no lora_adapters and no lora_folder", "lora")
        try:
            ref = self._adapters.find(name or "")
        except ConfigError as error:
            raise RequestError(str(error), "lora") from error
        if ref is None:
            known = ", ".join(self._adapters.names())
            raise RequestError(f"there is no adapter '{name}' ({known})", "lora", status=404)
        return ref

    def _per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts")
        return list(params)

    def _finish_steps(self) -> None:
        """Commit the steps in flight, as far as their results come."""
        with contextlib.suppress(EngineDeadError):  # was raised, or will be by the next step
            while self.core.process_one():
                pass
        self.core.scheduler.take_outputs()

    def _absorb(
        self,
        out: StepOutputs,
        detokenizer: DetokenizerManager | None,
        running: dict[int, _Running],
    ) -> list[int]:
        """Add a step's tokens to their results. Returns the rids that ended."""
        if detokenizer is None:
            return _absorb_ids(out, running)
        deltas, stopped = detokenizer.process(out)
        for rid in stopped:
            self.core.scheduler.abort(AbortRequest(rid=rid))
        ended = []
        for delta in deltas:
            _apply(delta, running[delta.rid])
            if delta.finish_reason is not None:
                ended.append(delta.rid)
        return ended


def make_executor(config: WorkerConfig) -> Executor:
    """An executor with its workers, ready.

    One worker runs in this process: in a thread of its own if the host computes, else in the
    caller's, because to launch a step on a device takes no time. Several are processes.
    """
    if config.engine.world_size == 1:
        return ThreadExecutor(config) if config.device == "cpu" else InProcessExecutor(config)
    from engine.executor.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor(config)


def _load_tokenizer(path: Any) -> Tokenizer | None:
    """The folder's tokenizer. None if it has none: then token ids go in and out."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return Tokenizer.from_pretrained(path) if any((path / n).exists() for n in names) else None


def _apply(delta: TextDelta, running: _Running) -> None:
    sequence = running.sequence
    sequence.text += delta.text
    sequence.token_ids.extend(delta.token_ids)
    sequence.logprobs.extend(delta.logprobs or ())
    if delta.prompt_logprobs is not None:
        running.result.prompt_logprobs = delta.prompt_logprobs
    if delta.finish_reason is None:
        return
    if delta.finish_reason == "error":
        raise RequestError(delta.error, delta.error_param, status=delta.error_status or 500)
    _end(running, delta.finish_reason, delta.stop_reason, delta.num_cached)


def _absorb_ids(out: StepOutputs, running: dict[int, _Running]) -> list[int]:
    rids: Iterable[int] = out.rids
    if out.counts is not None:
        rids = np.repeat(out.rids, out.counts).tolist()
    for rid, token in zip(rids, out.token_ids, strict=True):
        running[rid].sequence.token_ids.append(token)
    for end in out.finished:
        if end.reason == "error":
            raise RequestError(end.message, end.param, status=end.status or 500)
        _end(running[end.rid], end.reason, end.matched_token, end.num_cached)
    return [end.rid for end in out.finished]


def _end(running: _Running, reason: str, stop_reason: str | int | None, num_cached: int) -> None:
    running.sequence.finish_reason = reason
    running.sequence.stop_reason = stop_reason
    if running.sequence.index == 0:
        running.result.num_cached_tokens = num_cached
