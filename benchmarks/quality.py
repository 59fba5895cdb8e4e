"""What rounding weights changes: predictions on a text, beside those of the weights before it.

Engines are `LLM` in this process on CPU. They read the sources of some modules of the standard
library in pieces, and tell the log-probability of each token given those before it in its piece
(teacher forcing: a different choice does not change the text that follows).

A plain model is read with `quantization: int8` and `int4`, beside itself as it is. A quantized one
is read as it is, beside its dequantized weights in float32 by torch. Activations are bfloat16 where
the CPU multiplies it, otherwise float32; inputs of products with and without 8 bits
(`activation_quantization`).

ok: the likeliest token is the same at 97 % of the positions with weights of 8 bits or of a file (at
95 % with inputs of 8 bits, too), at 85 % with `int4`.

    python benchmarks/quality.py [--models FOLDER_OR_GGUF ...] [--save [FILE]]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.load.arguments import positive
from engine import LLM, SamplingParams
from engine.native.library import require_kernels
from engine.protocol.tokenizer_messages import LogprobEntry

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "quality.json"
MODULES = ("textwrap", "fnmatch", "graphlib", "heapq", "sched", "shlex", "bisect", "timeit")
"""The carried model has not been trained on them."""
PIECE = 1024
LIMITS = {"int8": 0.97, "int4": 0.85, "auto": 0.97}
SHORT_LIMIT = 0.95
"""At most so much is asked for where inputs have 8 bits, too."""


@dataclass(frozen=True)
class Quality:
    """Differences over all positions. Log-probabilities are in nats per token."""

    model: str
    quantization: str
    dtype: str
    activations: str
    """`activation_quantization`"""
    positions: int
    agreement: float
    """Share of the positions with the same likeliest token."""
    logprob_difference: float
    """Mean absolute difference of the log-probability of the text's token."""
    perplexity_before: float
    perplexity: float

    @property
    def limit(self) -> float:
        """The least agreement that is ok."""
        least = LIMITS[self.quantization]
        return min(least, SHORT_LIMIT) if self.activations == "int8" else least


def compare(
    model: str, dtype: str, quantization: str, activations: str, before: Sequence[LogprobEntry]
) -> Quality:
    """Read the text again with `quantization`, and compare with the predictions `before`."""
    found = predictions(
        model,
        len(before),
        dtype=dtype,
        quantization=quantization,
        activation_quantization=activations,
        kernels="cpu",
    )
    pairs = list(zip(before, found, strict=True))
    return Quality(
        model=Path(model).name,
        quantization=quantization,
        dtype=dtype,
        activations=activations,
        positions=len(pairs),
        agreement=sum(_likeliest(a) == _likeliest(b) for a, b in pairs) / len(pairs),
        logprob_difference=sum(abs(a.logprob - b.logprob) for a, b in pairs) / len(pairs),
        perplexity_before=_perplexity(before),
        perplexity=_perplexity(found),
    )


def predictions(model: str, positions: int, **config: str) -> list[LogprobEntry]:
    """Of all tokens but the first of each piece."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(
        model,
        device="cpu",
        max_model_len=PIECE + 1,
        max_total_tokens=2 * PIECE,
        max_running_requests=1,
        **config,
    ) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("\n".join(sources))[: positions + -(-positions // (PIECE - 1))]
        pieces = [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)]
        outputs = llm.generate(pieces, params, use_tqdm=False)
    return [entry for output in outputs for entry in output.prompt_logprobs or () if entry]


def _likeliest(entry: LogprobEntry) -> int:
    return entry.top[0][1]


def _perplexity(entries: Sequence[LogprobEntry]) -> float:
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["models/manta-small"])
    parser.add_argument("--positions", type=positive, default=16_000)
    parser.add_argument("--save", nargs="?", type=Path, const=SAVE_TO)
    args = parser.parse_args()
    dtype = "bfloat16" if require_kernels().isa() in ("avx512bf16", "amx") else "float32"
    rows = []
    for model in args.models:
        if model.endswith(".gguf"):
            before = predictions(model, args.positions, dtype="float32", kernels="torch")
            ways = dict.fromkeys((("float32", "none"), (dtype, "none"), (dtype, "int8")))
            rows += [compare(model, kind, "auto", inputs, before) for kind, inputs in ways]
        else:
            before = predictions(model, args.positions, dtype=dtype, kernels="cpu")
            ways = itertools.product(("int8", "int4"), ("none", "int8"))
            rows += [compare(model, dtype, form, inputs, before) for form, inputs in ways]
    ok = all(row.agreement >= row.limit for row in rows)
    print_table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows])
    figures = {
        "benchmark": "quality",
        "instruction_set": require_kernels().isa(),
        "modules": MODULES,
        "rows": [asdict(row) for row in rows],
    }
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
