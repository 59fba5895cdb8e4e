"""What int8 weights change: predictions on a text, beside those of the same model without them.

Both engines are `LLM` in this process on CPU. They read the sources of some modules of the standard
library in pieces, and tell the log-probability of each token given those before it in its piece
(teacher forcing: a different choice does not change the text that follows). The type of activations
is bfloat16 where the CPU multiplies it, otherwise float32.

ok: the likeliest token is the same at 97 % of the positions.

    python benchmarks/int8_quality.py [--model FOLDER] [--save [FILE]]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.load.arguments import positive
from engine import LLM, SamplingParams
from engine.native.library import require_kernels
from engine.protocol.tokenizer_messages import LogprobEntry

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "int8-quality.json"
MODULES = ("textwrap", "fnmatch", "graphlib", "heapq", "sched", "shlex", "bisect", "timeit")
"""The carried model has not been trained on them."""
PIECE = 1024
LIMIT = 0.97


@dataclass(frozen=True)
class Quality:
    """Differences over all positions. Log-probabilities and losses are in nats per token."""

    positions: int
    agreement: float
    """Share of the positions with the same likeliest token."""
    logprob_difference: float
    """Mean absolute difference of the log-probability of the text's token."""
    loss: float
    loss_int8: float


def compare(model: str, dtype: str, positions: int) -> Quality:
    """Read about `positions` tokens of the text with and without int8 weights."""
    plain = predictions(model, dtype, "auto", positions)
    quantized = predictions(model, dtype, "int8", positions)
    pairs = list(zip(plain, quantized, strict=True))
    return Quality(
        positions=len(pairs),
        agreement=sum(_likeliest(a) == _likeliest(b) for a, b in pairs) / len(pairs),
        logprob_difference=sum(abs(a.logprob - b.logprob) for a, b in pairs) / len(pairs),
        loss=-sum(entry.logprob for entry in plain) / len(plain),
        loss_int8=-sum(entry.logprob for entry in quantized) / len(quantized),
    )


def predictions(model: str, dtype: str, quantization: str, positions: int) -> list[LogprobEntry]:
    """Of all tokens but the first of each piece."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        device="cpu",
        attention_backend="cpu",
        max_model_len=PIECE + 1,
        max_total_tokens=2 * PIECE,
        max_running_requests=1,
    ) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("\n".join(sources))[: positions + -(-positions // (PIECE - 1))]
        pieces = [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)]
        outputs = llm.generate(pieces, params, use_tqdm=False)
    return [entry for output in outputs for entry in output.prompt_logprobs or () if entry]


def _likeliest(entry: LogprobEntry) -> int:
    return entry.top[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/manta-small")
    parser.add_argument("--positions", type=positive, default=16_000)
    parser.add_argument("--save", nargs="?", type=Path, const=SAVE_TO)
    args = parser.parse_args()
    dtype = "bfloat16" if require_kernels().isa() == "avx512bf16" else "float32"
    quality = compare(args.model, dtype, args.positions)
    ok = quality.agreement >= LIMIT
    headers = ["positions", "agreement", "mean |logprob difference|", "loss", "loss with int8"]
    print_table(headers, [list(asdict(quality).values())])
    figures = {
        "benchmark": "int8_quality",
        "model": args.model,
        "dtype": dtype,
        "instruction_set": require_kernels().isa(),
        "modules": MODULES,
        **asdict(quality),
    }
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
