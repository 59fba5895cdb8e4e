"""CPU time of vLLM's scheduler per decode step; runs in the peer's environment.

    python -m benchmarks.peers.vllm_scheduler MODEL

reads one JSON object per line, a `DecodeLoad` and "asynchronous", and answers each with a
`Measured` on one line. `schedule()` is the launch, `update_from_output()` the result; serialisation
and the model runner's side are not included. The configuration is that of `vllm serve` on this
machine, except for the number of requests, the block size, a token budget that takes all prompts in
one step, and statistics, which are off (they would cost more).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.decode_load import MAX_TOKENS, CacheThrash, DecodeLoad, Measured

BlockHasher = Callable[[Request], list[Any]]


def main() -> None:
    # vLLM logs to standard output, where the answers have to go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    thrash = CacheThrash()
    for line in sys.stdin:
        asked = json.loads(line)
        asynchronous = asked.pop("asynchronous")
        answer = measure(sys.argv[1], DecodeLoad(**asked), asynchronous, thrash)
        print(json.dumps(asdict(answer)), file=answers, flush=True)


def measure(model: str, load: DecodeLoad, asynchronous: bool, thrash: CacheThrash) -> Measured:
    """Prefill, warm up, then time every step. `asynchronous`: one step ahead of its results."""
    envs.disable_envs_cache()
    config = EngineArgs(
        model=model,
        block_size=load.page_size,
        max_num_seqs=load.num_requests,
        max_num_batched_tokens=load.prompt_tokens,
    ).create_engine_config(UsageContext.OPENAI_API_SERVER)
    scheduler, hasher = make_scheduler(config, load, asynchronous)
    # The engine core does the same at the end of its start.
    freeze_gc_heap()
    envs.enable_envs_cache()
    for prompt in load.prompts():
        scheduler.add_request(make_request(prompt, config, hasher))

    depth = 2 if asynchronous else 1
    rng = load.rng()
    in_flight: deque[SchedulerOutput] = deque()
    clock = time.thread_time_ns
    measured = Measured()
    for step in range(-load.warmup, load.steps):
        if step == 0:
            measured.context_len.append(context_len(scheduler))
        while len(in_flight) < depth:  # one step, except the first time
            if load.cold:
                thrash.run()
            start = clock()
            in_flight.append(scheduler.schedule())
            took_launch = clock() - start
        oldest = in_flight.popleft()
        result = make_result(oldest, load.tokens, rng)
        if load.cold:
            thrash.run()
        start = clock()
        outputs = scheduler.update_from_output(oldest, result)
        took_result = clock() - start
        measured.sound &= len(oldest.num_scheduled_tokens) == load.num_requests
        measured.sound &= sum(len(o.outputs) for o in outputs.values()) == load.num_requests
        if step >= 0:
            measured.launch_us.append(took_launch / 1e3)
            measured.result_us.append(took_result / 1e3)
    measured.context_len.append(context_len(scheduler))
    measured.sound &= len(scheduler.running) == load.num_requests
    scheduler.shutdown()
    del scheduler
    gc.unfreeze()
    gc.collect()
    return measured


def make_scheduler(
    config: VllmConfig, load: DecodeLoad, asynchronous: bool
) -> tuple[Scheduler, BlockHasher]:
    """A scheduler as `EngineCore` makes it, and its hasher of requests' blocks.

    On CPU vLLM itself never uses the asynchronous one, but it works there too.
    """
    model = config.model_config
    spec = FullAttentionSpec(
        block_size=load.page_size,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=torch.float32,
    )
    layers = [f"layer.{i}" for i in range(model.get_total_num_hidden_layers())]
    kv_cache_config = KVCacheConfig(
        num_blocks=load.kv_tokens // load.page_size + 1,  # block 0 is never given out
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    config.scheduler_config.async_scheduling = asynchronous
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    kind = AsyncScheduler if asynchronous else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return scheduler, get_request_block_hasher(hash_block_size, hash_fn)


def make_request(prompt: np.ndarray, config: VllmConfig, hasher: BlockHasher) -> Request:
    """A request as the front end makes it: eos from the model, an id like the endpoint's."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    eos = config.model_config.hf_config.eos_token_id
    params.update_from_generation_config(config.model_config.try_get_generation_config(), eos)
    return Request(
        request_id=f"cmpl-{uuid.uuid4().hex}-0",
        prompt_token_ids=prompt.tolist(),
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
    )


def make_result(
    scheduled: SchedulerOutput, token_range: tuple[int, int], rng: np.random.Generator
) -> ModelRunnerOutput:
    """One random token for each request."""
    ids = list(scheduled.num_scheduled_tokens)
    tokens = rng.integers(*token_range, len(ids)).tolist()
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={rid: i for i, rid in enumerate(ids)},
        sampled_token_ids=[[token] for token in tokens],
    )


def context_len(scheduler: Scheduler) -> float:
    """Mean tokens of the running requests, prompt and output received."""
    return float(np.mean([request.num_tokens for request in scheduler.running]))


if __name__ == "__main__":
    main()
