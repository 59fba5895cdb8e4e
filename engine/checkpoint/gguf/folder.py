"""`model_folder`: the files beside the weights of a Hugging Face model folder, made of a GGUF file
and kept in the user's folder for caches."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from engine.checkpoint.gguf.architectures import model_config
from engine.checkpoint.gguf.checkpoint import GgufCheckpoint, part_files, read_checkpoint
from engine.checkpoint.gguf.tokenizer import read_tokenizer
from engine.checkpoint.gguf.weights import stored_weights
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError
from engine.process.folders import FOLDER_VARIABLE, cache_folder, move_into_place

SOURCE_NAME = "gguf.json"
"""The file of a model folder that says where its weights are."""
_VERSION = 2
"""Of what is made of a file. Another one makes all folders anew."""
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of generation_config.json, and those of `general.sampling.` that mean the same."""
Additions = Mapping[str, dict[str, Any]]
"""Keys and values by the name of the JSON file that they are added to."""


class _Part(msgspec.Struct, frozen=True):
    """A file as it was."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> _Part:
        stat = os.stat(path)
        return cls(path, stat.st_size, stat.st_mtime_ns)


class _Source(msgspec.Struct, frozen=True):
    """The content of `SOURCE_NAME`."""

    parts: tuple[_Part, ...]


def model_folder(file: Path, additions: Additions | None = None) -> Path:
    """The folder for the GGUF model that `file` is, or is one of the files of. What `additions` say
    stands above what the file says.

    Raises `ConfigError` if Manta can't read the model, or has no place for the folder.
    """
    files = part_files(Path(os.path.abspath(file)))
    source = _Source(tuple(_Part.of(str(part)) for part in files))
    made_of = (_VERSION, tokenizers.__version__, source, additions or {})
    key = hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:16]
    name = re.sub(r"[^\w.-]", "_", files[0].stem, flags=re.ASCII)[:64]
    try:
        folder = cache_folder() / "gguf" / f"{name}-{key}"
    except RuntimeError as error:
        raise _no_place("there is no home folder") from error
    if (folder / SOURCE_NAME).is_file():
        return folder
    contents = folder_contents(read_checkpoint(files), additions)
    contents[SOURCE_NAME] = msgspec.json.encode(source)
    try:
        _store(folder, contents)
    except OSError as error:
        raise _no_place(f"{folder.parent} can't be written ({error.strerror})") from error
    return folder


def is_gguf_folder(folder: Path) -> bool:
    """Whether the weights of a model folder are in a GGUF file."""
    return (folder / SOURCE_NAME).is_file()


def open_checkpoint(folder: Path) -> GgufCheckpoint:
    """The GGUF model that `folder` was made of. Raises `ConfigError` if its files aren't the same
    any more."""
    parts = _parts_of(folder)
    for part in parts:
        try:
            is_same = _Part.of(part.path) == part
        except OSError as error:
            raise ConfigError(f"{part.path} can't be read: {error.strerror}.") from error
        if not is_same:
            raise ConfigError(f"{part.path} was replaced meanwhile; start again.")
    return read_checkpoint(tuple(Path(part.path) for part in parts))


def source_files(folder: Path) -> tuple[Path, ...]:
    """The GGUF files that a model folder was made of. Raises `ConfigError` if one is missing."""
    files = tuple(Path(part.path) for part in _parts_of(folder))
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} can't be read: it is no file any more.")
    return files


def _parts_of(folder: Path) -> tuple[_Part, ...]:
    try:
        source = msgspec.json.decode((folder / SOURCE_NAME).read_bytes(), type=_Source)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder / SOURCE_NAME} can't be read: {error}. Remove it.") from error
    return source.parts


def folder_contents(
    checkpoint: GgufCheckpoint, additions: Additions | None = None
) -> dict[str, bytes]:
    """The files of the folder by name, without `SOURCE_NAME`. `additions` as in `model_folder`.
    Raises `ConfigError` if Manta can't read the model."""
    stored_weights(checkpoint)  # raises for tensors that have no place
    tokenizer = read_tokenizer(checkpoint.metadata)
    more = additions or {}
    eos = {"eos_token_id": tokenizer.special_ids["eos_token_id"]}
    files: dict[str, dict[str, Any]] = {
        "config.json": {**model_config(checkpoint), **tokenizer.special_ids},
        "generation_config.json": {**eos, **_sampling(checkpoint.metadata)},
        "tokenizer_config.json": tokenizer.config,
    }
    try:
        made = {
            name: json.dumps(content | more.get(name, {}), indent=1, allow_nan=False).encode()
            for name, content in files.items()
        }
    except ValueError as error:  # from allow_nan
        raise ConfigError(f"{checkpoint.metadata.path} is damaged: {error}.") from error
    return {**made, "tokenizer.json": tokenizer.json.encode()}


def _sampling(metadata: ConfigValues) -> dict[str, float]:
    """What requests get that don't say it, as llama.cpp reads it since November 2025."""
    given: dict[str, float] = {}
    for name, key in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if type(value) not in (int, float):
            raise metadata.error(f"general.sampling.{key}", "a number")
        # 0.7 again, of the float32 that the file holds.
        given[name] = value if name == "top_k" else float(str(np.float32(value)))
    return given


def _store(folder: Path, contents: dict[str, bytes]) -> None:
    """Make the folder, whole or not at all. Another process may make the same one meanwhile."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        for name, content in contents.items():
            (made / name).write_bytes(content)
        move_into_place(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _no_place(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, where Manta keeps what it makes of GGUF files; set {FOLDER_VARIABLE} to a folder "
        "that can be written."
    )
