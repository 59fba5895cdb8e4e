"""A process that loads a model as a worker does and says what that took of memory: `python -m
tests.support.load_memory <folder for the libraries> <folder> [key=value ...]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from engine import LLM, SamplingParams
from engine.worker.auto_config import make_worker_config
from engine.worker.sizing.estimate import memory_of

PROMPT = list(range(3, 203))


class Taken(NamedTuple):
    """Bytes, beside what the process had before."""

    weights: int
    """As Manta estimates them."""
    cache: int
    loaded: int
    """Of its own memory, with the model loaded."""
    used: int
    """The same after a prompt and some tokens."""
    peak: int
    """The most at once while it loaded, with the pages of files that are mapped."""


def main(small: str, model: str, *settings: str) -> None:
    """Prints a `Taken` as JSON."""
    keys = dict(setting.split("=", 1) for setting in settings)
    with _loaded(small, keys) as llm:
        _use(llm)  # libraries, threads and their buffers are there now
    before, whole = status("RssAnon"), status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with _loaded(model, keys) as llm:
        loaded, peak = status("RssAnon"), status("VmHWM")
        _use(llm)
        used = status("RssAnon")
        need = memory_of(make_worker_config(llm.config.resolve()))
        tokens = llm.core.executor.num_kv_tokens
    cache = need.cache().num_bytes(tokens)
    taken = Taken(need.rank_weights(), cache, loaded - before, used - before, peak - whole)
    print(json.dumps(taken._asdict()))


def status(name: str) -> int:
    """Bytes by a line of this process' status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _loaded(model: str, keys: dict[str, str]) -> LLM:
    return LLM(model, device="cpu", max_total_tokens=2048, max_model_len=1024, **keys)


def _use(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    llm.generate([PROMPT], params, use_tqdm=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
