"""Embedding texts, beside computing the same prompts for generation.

One `engine.LLM` in this process. A batch of texts is embedded (`LLM.embed`, by the last hidden
state and by the mean) and generated from with one token of output (`LLM.generate`), in turns, with
an empty prefix cache each time. What is compared is prompt tokens per second. A mean has no
threshold: it needs the last layer's outputs of all tokens, which generation on CPU skips.

    python benchmarks/embeddings.py          # a table, one minute
    python benchmarks/embeddings.py --save   # also results/embeddings.json
"""

from __future__ import annotations

import argparse
import keyword
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from engine import LLM, SamplingParams
from engine.process.openmp import set_wait_policy

NEEDED = 0.95
"""Share of the generation's prompt tokens/s that embedding by the last state must reach."""
RESULT = REPO_ROOT / "benchmarks" / "results" / "embeddings.json"
WORDS = [*keyword.kwlist, *dir(str)]
PREFILL = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

Run = Callable[[list[str]], int]
"""Runs the texts; returns their number of tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="models/manta-small")
    parser.add_argument("--texts", type=int, default=64, help="texts of a batch")
    parser.add_argument("--words", default="20,100,400", help="words of a text, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write the result")
    args = parser.parse_args()
    set_wait_policy()
    with LLM(args.model, max_total_tokens=2**17) as llm:
        lengths = [int(words) for words in args.words.split(",")]
        rows = [row for words in lengths for row in compare(llm, args.texts, words, args.rounds)]
    headers = ["tokens/text", "way", "prompt tok/s", "of generation", "ok"]
    cells = [[r["tokens"], r["way"], r["speed"], r["ratio"], str(r["ok"])] for r in rows]
    print_table(headers, cells)
    ok = all(row["ok"] for row in rows)
    figures = {"model": args.model, "texts": args.texts, "rounds": args.rounds, "ways": rows}
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)


def compare(llm: LLM, texts: int, words: int, rounds: int) -> list[dict[str, Any]]:
    """Medians over the rounds: speed, and its ratio to the generation's in the same round."""

    def generate(batch: list[str]) -> int:
        return sum(len(o.prompt_token_ids) for o in llm.generate(batch, PREFILL, use_tqdm=False))

    def embed(pooling: Any) -> Run:
        return lambda batch: sum(
            len(o.prompt_token_ids) for o in llm.embed(batch, pooling=pooling, use_tqdm=False)
        )

    ways: dict[str, Run] = {
        "generate": generate,
        "embed last": embed("last"),
        "embed mean": embed("mean"),
    }
    rng = random.Random(words)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = 0
    for i in range(-1, rounds):  # the first one warms up
        batch = [" ".join(rng.choices(WORDS, k=words)) for _ in range(texts)]
        names = list(ways)[i % len(ways) :] + list(ways)[: i % len(ways)]
        for name in names:
            llm.core.scheduler.flush_cache()
            started = time.perf_counter()
            tokens = ways[name](batch)
            if i >= 0:
                speeds[name].append(tokens / (time.perf_counter() - started))
    base = np.array(speeds["generate"])
    return [
        {
            "tokens": tokens // texts,
            "way": name,
            "speed": float(np.median(found)),
            "ratio": (ratio := float(np.median(np.array(found) / base))),
            "rounds": found,
            "ok": name == "embed mean" or ratio >= NEEDED,
        }
        for name, found in speeds.items()
    ]


if __name__ == "__main__":
    main()
