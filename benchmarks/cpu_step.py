"""A step on CPU against a bare loop of the same kernels: what the engine adds to the arithmetic.

The engine is `LLM` in this process. The bare loop calls the kernels of `engine/csrc/` layer by
layer on prepared tensors and takes the argmax. Both take turns. The loop is also timed kernel by
kernel, which shows where a step's time goes. Beside a decode stands how long its weights and cached
tokens take to be read from memory, at the rate at which torch adds up a large tensor in this run.

    python benchmarks/cpu_step.py                         # the 88 M Llama, one thread
    python benchmarks/cpu_step.py --threads 1,2 --save
    python benchmarks/cpu_step.py --model smollm2-q8_0.gguf --threads 1,2 --save
    python benchmarks/cpu_step.py --impls --save          # transformers' code beside our own

With `--impls` there is no bare loop: two engines take turns, one with Manta's code of the model and
one with that of transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.process.openmp import set_wait_policy

set_wait_policy()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result  # noqa: E402
from benchmarks.peers import models  # noqa: E402
from engine.device.distributed import ParallelState  # noqa: E402
from engine.layers.linear_kernel import GroupedKernel  # noqa: E402
from engine.llm import LLM  # noqa: E402
from engine.models.llama import LlamaModel  # noqa: E402
from engine.native.library import require_kernels  # noqa: E402
from engine.protocol.sampling_params import SamplingParams  # noqa: E402
from engine.worker.auto_config import make_worker_config  # noqa: E402
from engine.worker.tp_worker import TpModelWorker  # noqa: E402

RESULTS = REPO_ROOT / "benchmarks" / "results"
LIMIT = 1.15
IMPL_LIMITS = {1: 1.20, 8: 1.10, 32: 1.05}
"""Of a decode's time through transformers, by rows; of other sizes and prompts it is the last."""
PAGE_SIZE = 32
PROMPT_LEN = 256
OUTPUT_LEN = 64
CHUNK = 512
CHUNKS = 4
READ_BYTES = 1 << 30

Op = tuple[str, Callable[[], object]]


class BareLoop:
    """One step: `rows` rows of `queries` tokens, each with `length` tokens in the cache."""

    def __init__(
        self, model: LlamaModel, worker: TpModelWorker, queries: int, length: int, rows: int
    ):
        kernels: Any = require_kernels()
        runner = worker.runner
        config = model.config
        self.num_bytes = _bytes_read(model, worker, rows * length)
        """Of weights and cached tokens that a decode reads."""
        tokens = rows * queries
        pages = -(-length // PAGE_SIZE)
        for row in range(rows):
            first = (1 + row * pages) * PAGE_SIZE
            slots = torch.arange(first, first + length, dtype=torch.int32)
            runner.req_to_token[row + 1, :length] = slots
        requests = torch.arange(1, rows + 1)
        starts = torch.arange(0, tokens + 1, queries)
        lengths = torch.full((rows,), length)
        positions = torch.arange(length - queries, length).repeat(rows)
        slots = runner.req_to_token[1 : rows + 1, length - queries : length].long().flatten()
        x = torch.randn(tokens, config.hidden_size).to(model.dtype)
        residual = torch.randn_like(x)
        self.ops: list[Op] = []
        for layer in model.layers:
            attention, mlp = layer.attention, layer.mlp
            pool = runner.kv_pool.get(attention.layer.layer_id)
            qkv = attention.qkv(x).view(tokens, attention.num_qkv_heads, config.head_dim)
            q, k = (
                qkv[:, : attention.num_heads],
                qkv[:, attention.num_heads : attention.num_qk_heads],
            )
            v = qkv[:, attention.num_qk_heads :]
            out = torch.randn(tokens, attention.num_heads * config.head_dim).to(model.dtype)
            gate_up = mlp.gate_up(x)
            norms = (layer.input_norm, layer.post_norm)
            self.ops += [
                ("norm", partial(kernels.add_rms_norm_, x, residual, norms[0].weight, 1e-5)),
                ("linear", partial(attention.qkv, x)),
                ("rope", partial(kernels.rotate_, positions, q, k, model.rotary.cos_sin)),
                (
                    "attention",
                    partial(
                        kernels.attention,
                        *(q, k, v, pool.k, pool.v, slots, runner.req_to_token),
                        *(requests, starts, lengths, attention.layer.call.scale, 0, 0, 0.0, None),
                    ),
                ),
                ("linear", partial(attention.o.kernel, out)),
                ("norm", partial(kernels.add_rms_norm_, x, residual, norms[1].weight, 1e-5)),
                ("linear", partial(mlp.gate_up, x)),
                ("silu", partial(kernels.silu_and_mul, gate_up)),
                ("linear", partial(mlp.down.kernel, kernels.silu_and_mul(gate_up))),
            ]
        last = x[queries - 1 :: queries].contiguous()
        self.ops.append(("logits", partial(_next_tokens, model, last)))

    @torch.inference_mode()
    def seconds(self) -> float:
        """Time of one pass."""
        started = time.perf_counter()
        for _, op in self.ops:
            op()
        return time.perf_counter() - started

    @torch.inference_mode()
    def parts(self, count: int) -> dict[str, float]:
        """Milliseconds of a pass by kind of kernel, medians of `count` passes."""
        passes: list[dict[str, float]] = []
        for _ in range(count):
            parts: dict[str, float] = {}
            for name, op in self.ops:
                started = time.perf_counter()
                op()
                parts[name] = parts.get(name, 0.0) + (time.perf_counter() - started) * 1e3
            passes.append(parts)
        return {name: statistics.median(p[name] for p in passes) for name in passes[0]}


def _next_tokens(model: LlamaModel, hidden: Tensor) -> object:
    return model.compute_logits(hidden).numpy().argmax(-1)


def _bytes_read(model: LlamaModel, worker: TpModelWorker, cached: int) -> int:
    """By a decode: all matrices but the embedding, and the keys and values of `cached` tokens."""
    kernels: list[Any] = [model.head.kernel]  # type: ignore[union-attr]
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        kernels += [kind.kernel for kind in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    weights = sum(
        kernel.num_bytes if isinstance(kernel, GroupedKernel) else kernel.packed.nbytes
        for kernel in kernels
    )
    pools = [worker.runner.kv_pool.get(layer.layer_id) for layer in model.attention_layers]
    return weights + cached * sum(pool.k[0].nbytes + pool.v[0].nbytes for pool in pools)


def read_rate() -> float:
    """Bytes a second at which all threads read memory: the best of some passes."""
    numbers = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(8):
        started = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - started)
    return numbers.nbytes / min(times)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="a folder (default: the 88 M Llama of the peers)")
    parser.add_argument("--threads", default="1", help="compute threads, comma-separated")
    parser.add_argument("--rows", default="1,8,32", help="decode batches, comma-separated")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--impls", action="store_true", help="transformers' code beside ours")
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args(argv)
    model = args.model or str(models.build("llama-88m", PEERS / "models" / "llama-88m"))
    rows: list[dict[str, Any]] = []
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        config = {
            "model": model,
            "dtype": args.dtype,
            "cpu_threads": threads,
            "attention_backend": "cpu",
            "page_size": PAGE_SIZE,
            "max_running_requests": 64,
            "max_total_tokens": 65536,
            "max_model_len": 2560,
            "chunked_prefill_size": CHUNK,
        }
        batches = [int(n) for n in args.rows.split(",")]
        own: Any = config | {"model_impl": "native"}
        other: Any = config | {"model_impl": "transformers"}
        with LLM(**own) as llm:
            if not args.impls:
                rows += compare(llm, threads, batches, args.rounds)
                continue
            with LLM(**other) as through:
                rows += compare_impls(llm, through, threads, batches, args.rounds)
    names = ["step", "threads", "native_ms", "transformers_ms", "ratio"]
    if not args.impls:
        names[2:4] = ["engine_ms", "bare_ms"]
        names.append("memory_ms")
    print_table(
        [*(name.replace("_", " ") for name in names), *([] if args.impls else ["by kernel, ms"])],
        [
            [*(r[name] for name in names), *([] if args.impls else [_text(r["parts_ms"])])]
            for r in rows
        ],
    )
    ok = all(r["ratio"] <= r.get("limit", LIMIT) for r in rows)
    name = "cpu-step-impls" if args.impls else "cpu-step"
    if args.model:
        name += f"-{Path(model).stem}"
    figures = {
        "benchmark": name,
        "model": Path(model).name,
        "dtype": args.dtype,
        "rows": rows,
    }
    if args.save:
        save_result(RESULTS / f"{name}.json", figures, ok)
    finish(figures, ok)


def compare(llm: LLM, threads: int, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds in which engine and bare loop take turns."""
    worker = TpModelWorker(make_worker_config(llm.config.resolve()), ParallelState.single())
    model = worker.runner.model
    middle = PROMPT_LEN + OUTPUT_LEN // 2
    rate = read_rate()
    steps: list[tuple[str, Callable[[], float], list[BareLoop]]] = [
        (
            f"decode of {n}",
            partial(engine_decode, llm, n),
            [BareLoop(model, worker, 1, middle, n)],
        )
        for n in batches
    ]
    chunks = [BareLoop(model, worker, CHUNK, CHUNK * (i + 1), 1) for i in range(CHUNKS)]
    steps.append((f"prefill of {CHUNKS} x {CHUNK}", partial(engine_prefill, llm), chunks))
    results = []
    for name, engine, loops in steps:
        repeat = 15 if len(loops) == 1 else 1
        engine_s, bare_s = [], []
        for _ in range(rounds + 1):
            engine_s.append(engine())
            bare_s.append(
                statistics.median(sum(loop.seconds() for loop in loops) for _ in range(repeat))
            )
        engine_ms = statistics.median(engine_s[1:]) * 1e3
        bare_ms = statistics.median(bare_s[1:]) * 1e3
        parts: dict[str, float] = {}
        for loop in loops:
            for kernel, ms in loop.parts(5).items():
                parts[kernel] = parts.get(kernel, 0.0) + ms
        results.append(
            {
                "step": name,
                "threads": threads,
                "engine_ms": engine_ms,
                "bare_ms": bare_ms,
                "ratio": engine_ms / bare_ms,
                "memory_ms": loops[0].num_bytes / rate * 1e3 if len(loops) == 1 else None,
                "read_bytes_per_s": rate,
                "parts_ms": parts,
            }
        )
    return results


def compare_impls(
    own: LLM, other: LLM, threads: int, batches: list[int], rounds: int
) -> list[dict[str, Any]]:
    """Medians over rounds in which an engine with Manta's code and one with that of transformers
    take turns."""
    steps: list[tuple[str, Callable[[LLM], float], float]] = [
        (f"decode of {n}", partial(engine_decode, batch=n), IMPL_LIMITS.get(n, IMPL_LIMITS[32]))
        for n in batches
    ]
    steps.append((f"prefill of {CHUNKS} x {CHUNK}", engine_prefill, IMPL_LIMITS[32]))
    results = []
    for name, measure, limit in steps:
        pairs = [(measure(own), measure(other)) for _ in range(rounds + 1)]
        own_ms, other_ms = (
            statistics.median(column[1:]) * 1e3 for column in zip(*pairs, strict=True)
        )
        results.append(
            {
                "step": name,
                "threads": threads,
                "native_ms": own_ms,
                "transformers_ms": other_ms,
                "ratio": other_ms / own_ms,
                "limit": limit,
            }
        )
    return results


def engine_decode(
    llm: LLM,
    batch: int,
    *,
    prompt_len: int = PROMPT_LEN,
    output_len: int = OUTPUT_LEN,
    lora: Sequence[str] | None = None,
) -> float:
    """Median seconds from one result to the next while `batch` rows decode, with the adapters
    `lora` [batch] if any."""
    rng = np.random.default_rng()
    prompts = [rng.integers(5, llm.vocab_size, prompt_len).tolist() for _ in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    llm.generate(prompts, params, lora=lora, use_tqdm=False)
    spans = llm.core.trace.snapshot(output_len // 2)
    ends = [s.received_at for s in spans if s.mode == "decode" and s.num_rows == batch]
    return statistics.median(b - a for a, b in pairwise(ends))


def engine_prefill(llm: LLM) -> float:
    """Seconds from the first to the last result of a prompt's chunks, scaled to all of them."""
    rng = np.random.default_rng()
    prompt = rng.integers(5, llm.vocab_size, CHUNK * CHUNKS).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    started = time.monotonic()
    llm.generate([prompt], params, use_tqdm=False)
    return llm.core.trace.snapshot(1)[0].received_at - started


def _text(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())


if __name__ == "__main__":
    main()
