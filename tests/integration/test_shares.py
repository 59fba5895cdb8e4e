"""Models of transformers over tensor parallel ranks and pipeline stages, in processes over gloo.

Starting processes is what takes the time, so four of them play all models one after the other and
the tests look at what they report.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers

from engine.checkpoint import layout
from engine.checkpoint.expert_map import ExpertMap
from engine.checkpoint.layout import read_layout
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.device.distributed import init_parallel
from engine.models.recording import record
from tests.support.engines import greedy_reference, load_reference
from tests.support.models import DIVISIBLE_HEADS, THROUGH_TRANSFORMERS, make_model
from tests.support.step_driver import StepDriver, make_runner, run_lines

MAX_NEW = 8
PROMPTS = [[5], [7 + 5 * i % 190 for i in range(40)], [3, 4, 100] * 9]
TOLERANCE = 1e-4
ALL = [name for name in THROUGH_TRANSFORMERS if name != "gemma4"]
"""Gemma 4's layers read more than the one before them gives."""
SOME = ("phi3", "gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral")
SPLITS = {"tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2), "tp4": (4, 1)}
MIXTURES = ("gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral")
GROUPS = {"tp2-ep1": (2, 1), "tp2-ep2-map": (2, 2), "tp4-ep2": (4, 2)}
"""Ranks, and groups of them that divide a mixture's experts. Our kernels compute these."""
MAP = ExpertMap({2: [[0, 3], [1, 2]], 3: [[2, 1], [3, 0]]})
"""Where experts of some layers stand in one of these."""
# Far above the test's own time limit: nothing here may end because of it.
TIMEOUT_S = 600.0


@dataclass
class Stage:
    """What all players share."""

    folder: Path
    lines: dict[str, list[list[int]]]
    """By model: its prompts, each with transformers' greedy tokens behind it."""
    queue: Any


def player(rank: int, stage: Stage) -> None:
    torch.set_num_threads(1)
    for model in stage.lines:
        if rank < 2:
            play(model, "tp2", rank, stage)
        else:
            play(model, "pp2", rank - 2, stage)
        play(model, "tp2-pp2", rank, stage)
        play(model, "tp4", rank, stage)
        for split, (tp_size, _) in GROUPS.items() if model in MIXTURES else ():
            if rank < tp_size:
                play(model, split, rank, stage)


def play(model: str, split: str, rank: int, stage: Stage) -> None:
    meeting = f"file://{stage.folder}/{model}.{split}"
    kernels = EngineConfig().kernel_choice("torch")
    folder = stage.folder / model
    config = ModelConfig.from_pretrained(folder)
    if split in GROUPS:
        tp_size, ep_size = GROUPS[split]
        parallel = init_parallel("gloo", meeting, rank, tp_size, 1, TIMEOUT_S)
        parallel = replace(parallel, ep_size=ep_size)
        kernels = EngineConfig().kernel_choice("cpu")
        if split.endswith("map"):
            assert config.layout is not None
            config = replace(config, layout=MAP.place(config.layout, ep_size))
    else:
        parallel = init_parallel("gloo", meeting, rank, *SPLITS[split], TIMEOUT_S)
    changes: dict[str, Any] = {"page_size": 4, "kernels": kernels, "model": config}
    runner = make_runner(str(folder), parallel=parallel, **changes)
    found = run_lines(StepDriver(runner), stage.lines[model], MAX_NEW)
    if parallel.is_last_stage:
        stage.queue.put(((model, split), [rows.numpy() for rows in found]))
    torch.distributed.barrier()
    parallel.destroy()


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, str], list[Any]]:
    """Of each model and split, what the ranks of its last stage report."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("shares")
    lines = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTA_CACHE_DIR", str(folder / "cache"))
        patch.setattr(layout, "_record", lambda f: layout.msgspec.json.encode(record(f)))
        for name in ALL if request.config.getoption("--full-matrix") else SOME:
            arch, keys = THROUGH_TRANSFORMERS[name]
            keys = keys | DIVISIBLE_HEADS.get(name, {})
            path = make_model(folder / name, arch, num_hidden_layers=4, **keys)
            read_layout(path)
            outputs = greedy_reference(load_reference(path), PROMPTS, MAX_NEW)
            assert len({tuple(tokens) for tokens in outputs}) == len(PROMPTS)
            lines[name] = [p + tokens for p, tokens in zip(PROMPTS, outputs, strict=True)]
        context = mp.get_context("spawn")
        stage = Stage(folder, lines, context.Queue())
        started = mp.start_processes(player, (stage,), nprocs=4, join=False, start_method="spawn")
        found: dict[tuple[str, str], list[Any]] = {}
        missing = len(lines) * sum(tp_size for tp_size, _ in SPLITS.values())
        num_mixtures = len(lines.keys() & set(MIXTURES))
        missing += num_mixtures * sum(tp_size for tp_size, _ in GROUPS.values())
        while missing:
            try:
                scene, report = stage.queue.get(timeout=5)
            except queue.Empty:
                started.join(timeout=0)  # raises the error of a player that failed
                continue
            found.setdefault(scene, []).append(report)
            missing -= 1
        while not started.join(timeout=60):
            pass
    found["folder", ""] = [folder]
    return found


@pytest.mark.parametrize("split", GROUPS)
@pytest.mark.parametrize("name", MIXTURES)
def test_groups_of_ranks_divide_experts(
    reports: dict[tuple[str, str], list[Any]], name: str, split: str
) -> None:
    _compare(reports, name, split, GROUPS[split][0])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ALL)
def test_ranks_give_the_logits_of_transformers(
    reports: dict[tuple[str, str], list[Any]], name: str, split: str
) -> None:
    if (name, split) not in reports:
        pytest.skip("with --full-matrix only")
    _compare(reports, name, split, SPLITS[split][0])


def _compare(
    reports: dict[tuple[str, str], list[Any]], name: str, split: str, tp_size: int
) -> None:
    model = load_reference(reports["folder", ""][0] / name)
    found = reports[name, split]
    assert len(found) == tp_size
    outputs = greedy_reference(model, PROMPTS, MAX_NEW)
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, outputs, strict=True)):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt + tokens])).logits[0].float()
        for logits in found:
            mine = torch.from_numpy(logits[number])
            torch.testing.assert_close(mine, wanted, atol=TOLERANCE, rtol=TOLERANCE)
            assert mine[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
            assert (logits[number] == found[0][number]).all(), "ranks sample from equal logits"
