"""Folders of adapters: what is read of them, what is refused and why, and their copies."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.checkpoint import adapter_store
from engine.checkpoint.adapter import PeftAdapter, check_adapter_name
from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.checkpoint.adapter_store import open_adapter, take_adapter
from engine.errors import ConfigError
from engine.process.folders import FOLDER_VARIABLE

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def write(
    folder: Path, tensors: dict[str, tuple[int, int]] | None = None, value: float = 1.0, **keys: Any
) -> Path:
    """An adapter of rank 4 for two linears; `tensors` are shapes instead of theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {
        f"base_model.model.{Q}.lora_A.weight": (4, 8),
        f"base_model.model.{Q}.lora_B.weight": (6, 4),
        f"base_model.model.{DOWN}.lora_A.weight": (4, 10),
        f"base_model.model.{DOWN}.lora_B.weight": (8, 4),
    }
    shapes = shapes if tensors is None else tensors
    save_file(
        {name: np.full(shape, value, np.float32) for name, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "own/base"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **keys}))
    return folder


def test_what_is_read(tmp_path: Path) -> None:
    found = PeftAdapter.open(write(tmp_path / "a"))
    assert found.base == "own/base"
    assert found.rank == 4
    assert {name: (f.in_size, f.out_size, f.scale) for name, f in found.linears.items()} == {
        Q: (8, 6, 2.0),
        DOWN: (10, 8, 2.0),
    }


def test_patterns(tmp_path: Path) -> None:
    """As PEFT has them: a name, or its end behind a dot; "^" is the name's beginning."""
    folder = write(
        tmp_path / "a", use_rslora=True, alpha_pattern={"own_proj": 1, "q_proj": 3, "proj": 9}
    )
    linears = PeftAdapter.open(folder).linears
    assert linears[Q].scale == 3 / 2
    assert linears[DOWN].scale == 8 / 2
    found = PeftAdapter.open(write(tmp_path / "b", alpha_pattern={rf"^{Q}": 1, "down_proj$": 2}))
    assert [found.linears[name].scale for name in (Q, DOWN)] == [0.25, 0.5]


Spoil = Callable[[Path], object]


def config(**keys: Any) -> Spoil:
    return lambda folder: write(folder, **keys)


def tensors(**shapes: tuple[int, int]) -> Spoil:
    full = {f"base_model.model.{Q}.{name}": shape for name, shape in shapes.items()}
    return lambda folder: write(folder, {name.replace("_w", ".w"): s for name, s in full.items()})


REFUSED: dict[str, tuple[Spoil, str]] = {
    "dora": (config(use_dora=True), "DoRA"),
    "bias": (config(bias="all"), "biases"),
    "lora bias": (config(lora_bias=True), "biases"),
    "modules": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "tokens": (config(trainable_token_indices=[1]), "embeddings"),
    "experts": (config(target_parameters=["mlp.experts.down_proj"], r=3), "rank 4"),
    "pissa": (config(init_lora_weights="pissa_niter_16"), "convert it to plain LoRA"),
    "unknown use": (config(use_something=True), "use_something"),
    "kind": (config(peft_type="IA3"), "IA3"),
    "rank 0": (config(r=0), "r must be"),
    "rank of another type": (config(r="4"), "r must be"),
    "other rank": (config(r=8), "rank 4"),
    "alpha": (config(lora_alpha="x"), "lora_alpha must be"),
    "alpha NaN": (config(lora_alpha=float("nan")), "lora_alpha must be"),
    "evil pattern": (config(rank_pattern={"(a+)+$": 4}), "only names"),
    "no pattern": (config(rank_pattern=[1]), "rank_pattern"),
    "no B": (tensors(lora_A_weight=(4, 8)), "lacks lora_B"),
    "no A": (tensors(lora_B_weight=(4, 8)), "lacks lora_A"),
    "ranks differ": (tensors(lora_A_weight=(4, 8), lora_B_weight=(6, 5)), "rank 4 and 5"),
    "magnitude": (tensors(lora_magnitude_vector=(4, 8)), "no matrix of LoRA"),
    "embedding": (tensors(lora_embedding_A=(4, 8)), "no matrix of LoRA"),
    "nothing": (lambda folder: write(folder, {}), "holds no matrices"),
    "no config": (lambda f: (write(f) / "adapter_config.json").unlink(), "can't be read"),
    "no JSON": (lambda f: (write(f) / "adapter_config.json").write_text("{"), "no JSON"),
    "a list": (lambda f: (write(f) / "adapter_config.json").write_text("[]"), "no object"),
    "deep": (lambda f: (write(f) / "adapter_config.json").write_text("[" * 10**5), "no JSON"),
    "large": (lambda f: (write(f) / "adapter_config.json").write_text(" " * 2**21), "MiB"),
    "no weights": (lambda f: (write(f) / "adapter_model.safetensors").unlink(), "has no"),
    "a pickle": (
        lambda f: (write(f) / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "pickle",
    ),
    "truncated": (
        lambda f: os.truncate(write(f) / "adapter_model.safetensors", 200),
        "can't be read",
    ),
    "a header of 2^60 bytes": (
        lambda f: (write(f) / "adapter_model.safetensors").write_bytes(
            struct.pack("<Q", 2**60) + b"{}"
        ),
        "can't be read",
    ),
    "no folder": (lambda f: shutil.rmtree(write(f)), "no adapter folder"),
}


@pytest.mark.parametrize("fault", sorted(REFUSED))
def test_what_is_refused(tmp_path: Path, fault: str) -> None:
    spoil, says = REFUSED[fault]
    spoil(tmp_path / "a")
    with pytest.raises(ConfigError, match=says):
        PeftAdapter.open(tmp_path / "a")
    with pytest.raises(ConfigError, match=says):
        take_adapter("x", tmp_path / "a", 64)


def test_ranks(tmp_path: Path) -> None:
    huge = {
        f"base_model.model.{Q}.lora_A.weight": (100_000, 1),
        f"base_model.model.{Q}.lora_B.weight": (1, 100_000),
    }
    folder = write(tmp_path / "a", huge, r=100_000)
    with pytest.raises(ConfigError, match="rank 100000 and max_lora_rank is 64"):
        take_adapter("x", folder, 64)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files(tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes are an adapter or are refused with a sentence."""
    folder = write(tmp_path / "a")
    name = data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content) - 1, 700)))
        content[at] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert PeftAdapter.open(folder).linears
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize("name", ["", "../up", "a/../b", ".hidden", "a b", "ä", "x" * 300, "a\n"])
def test_names(name: str) -> None:
    with pytest.raises(ConfigError):
        check_adapter_name(name)


def test_versions_have_copies(tmp_path: Path, cache: Path) -> None:
    """A version that was taken stays, whatever happens to its folder."""
    folder = write(tmp_path / "a", value=1.0)
    old = take_adapter("x", folder, 64)
    assert take_adapter("y", folder, 64).digest == old.digest
    write(folder, value=2.0)
    new = take_adapter("x", folder, 64)
    assert new.digest != old.digest
    shutil.rmtree(folder)
    for ref in (old, new):
        assert open_adapter(ref).folder == cache / "adapters" / ref.digest
    write(folder, value=3.0)
    shutil.rmtree(cache / "adapters" / old.digest)
    with pytest.raises(ConfigError, match="another version"):
        open_adapter(old)
    write(folder, value=1.0)
    assert open_adapter(old).rank == 4


def test_old_copies_are_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [take_adapter("x", write(tmp_path / "a", value=v), 64) for v in (1.0, 2.0)]
    os.utime(cache / "adapters" / refs[0].digest, (1.0, 1.0))
    take_adapter("x", write(tmp_path / "a", value=3.0), 64)
    assert {path.name for path in (cache / "adapters").iterdir()} == {
        refs[1].digest,
        take_adapter("x", tmp_path / "a", 64).digest,
    }


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=FOLDER_VARIABLE):
        take_adapter("x", write(tmp_path / "a"), 64)
    assert adapter_store.KEEP_S > 3600


def test_links_out_of_a_folder(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside")
    inside = tmp_path / "inside"
    (inside / "files").mkdir(parents=True)
    (inside / "whole").symlink_to(outside)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (inside / "files" / name).symlink_to(outside / name)
    catalog = AdapterCatalog({}, str(inside), 64)
    for name in ("whole", "files"):
        with pytest.raises(ConfigError, match="leads out"):
            catalog.find(name)


def test_the_catalog(tmp_path: Path) -> None:
    listed = write(tmp_path / "listed", value=1.0)
    write(tmp_path / "folder" / "a", value=2.0)
    write(tmp_path / "folder" / "b c", value=2.0)
    catalog = AdapterCatalog({"own": str(listed)}, str(tmp_path / "folder"), 64)
    assert catalog.names() == ["a", "own"]
    first, own = catalog.find("a"), catalog.find("own")
    assert first is not None
    assert catalog.find("a") is first
    for name in ("b c", "c", "../listed", ""):
        assert catalog.find(name) is None
    write(tmp_path / "folder" / "a", value=3.0)
    write(listed, value=3.0)
    again = catalog.find("a")
    assert again is not None
    assert again.digest != first.digest
    assert catalog.find("own") == own  # as it was at the start
    shutil.rmtree(tmp_path / "folder" / "a")
    assert catalog.find("a") is None
    assert catalog.names() == ["own"]
