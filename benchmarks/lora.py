"""What adapters cost: decodes of rows with none, one or eight, beside an engine without any.

Two engines in this process take turns (`engine.LLM`): one whose configuration has no adapters, and
one with eight. Rows have random prompts; all matrices of all layers have adapters.

    python benchmarks/lora.py                            # the 88 M Llama, rank 16, one thread
    python benchmarks/lora.py --quantization int4 --save
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.process.openmp import set_wait_policy

set_wait_policy()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.common import PEERS, REPO_ROOT, finish, print_table, save_result  # noqa: E402
from benchmarks.cpu_step import engine_decode  # noqa: E402
from benchmarks.peers import models  # noqa: E402
from engine.checkpoint.model_config import ModelConfig  # noqa: E402
from engine.llm import LLM  # noqa: E402
from engine.protocol.sampling_params import SamplingParams  # noqa: E402

RESULTS = REPO_ROOT / "benchmarks" / "results"
LIMITS = {0: 1.02, 1: 1.15, 8: 1.35}
"""Of a decode's time, by adapters in it."""
NUM_ADAPTERS = 8
PROMPT_LEN = 32
OUTPUT_LEN = 40


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> Path:
    """An adapter with random numbers for all matrices of a Llama's layers, as bfloat16."""
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for name, (size, out) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("A", (rank, size)), ("B", (out, rank))):
                numbers = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{prefix}.lora_{side}.weight"] = numbers.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def decode_ms(llm: LLM, rows: int, adapters: int) -> float:
    """Milliseconds of a decode of `rows` lines, which have so many adapters in turn."""
    names = [f"a{n % adapters}" for n in range(rows)] if adapters else None
    sizes = {"prompt_len": PROMPT_LEN, "output_len": OUTPUT_LEN}
    return engine_decode(llm, rows, lora=names, **sizes) * 1e3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="a Llama's folder (default: the 88 M one of the peers)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", default="1,32", help="decode batches, comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args(argv)
    model = args.model or str(models.build("llama-88m", PEERS / "models" / "llama-88m"))
    torch.set_num_threads(args.threads)
    config: dict[str, Any] = {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "cpu_threads": args.threads,
        "max_running_requests": 64,
        "max_total_tokens": 16384,
        "max_model_len": 512,
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelConfig.from_pretrained(model)
        adapters = {
            f"a{n}": str(write_adapter(Path(folder) / f"a{n}", shape, args.rank, n))
            for n in range(NUM_ADAPTERS)
        }
        more: dict[str, Any] = {
            "lora_adapters": adapters,
            "max_loras": NUM_ADAPTERS,
            "max_lora_rank": args.rank,
        }
        with LLM(model, **config) as plain, LLM(model, **config, **more) as adapted:
            once = SamplingParams(temperature=0.0, max_tokens=1)
            adapted.generate([[5]] * len(adapters), once, lora=list(adapters), use_tqdm=False)
            for batch in map(int, args.rows.split(",")):
                rows += compare(plain, adapted, batch, args.rounds)
    print_table(
        ["rows", "adapters", "plain ms", "adapted ms", "ratio", "limit"],
        [
            [r["rows"], r["adapters"], r["plain_ms"], r["adapted_ms"], r["ratio"], r["limit"]]
            for r in rows
        ],
    )
    ok = all(row["ratio"] <= row["limit"] for row in rows if row["limit"])
    name = "lora" if args.quantization == "auto" else f"lora-{args.quantization}"
    figures = {
        "benchmark": name,
        "model": Path(model).name,
        "rank": args.rank,
        "threads": args.threads,
        "dtype": args.dtype,
        "rows": rows,
    }
    if args.save:
        save_result(RESULTS / f"{name}.json", figures, ok)
    finish(figures, ok)


def compare(plain: LLM, adapted: LLM, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds in which the engines take turns; the limits are for 32 rows."""
    kinds = [n for n in LIMITS if n <= batch]
    times: dict[int, list[tuple[float, float]]] = {n: [] for n in kinds}
    for _ in range(rounds + 1):
        for n in kinds:
            times[n].append((decode_ms(plain, batch, 0), decode_ms(adapted, batch, n)))
    found = []
    for n in kinds:
        pairs = times[n][1:]
        own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        found.append(
            {
                "rows": batch,
                "adapters": n,
                "plain_ms": own,
                "adapted_ms": other,
                "ratio": statistics.median(b / a for a, b in pairs),
                "limit": LIMITS[n] if batch == 32 else None,
            }
        )
    return found


if __name__ == "__main__":
    main()
