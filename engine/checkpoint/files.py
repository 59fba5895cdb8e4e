"""Which files of a model folder hold its weights. transformers would take the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class WeightFiles(NamedTuple):
    """Names of files in the model folder, and the index that lists them, if one does."""

    names: list[str]
    weight_map: dict[str, str] | None
    """The file of each tensor, as the index says."""


def find_weight_files(folder: Path) -> WeightFiles:
    """The files of the weights: model.safetensors, else those of the index, else all *.safetensors.

    Other files may lie beside them, as copies of an earlier state do. They are not read. Raises
    `ConfigError` if there are no files, or the index can't be followed.
    """
    single = folder / SINGLE_NAME
    if single.is_symlink() and not single.exists():
        raise ConfigError(f"{single} is a link to nothing; download the model again.")
    if single.is_file():
        return WeightFiles([SINGLE_NAME], None)
    if (folder / INDEX_NAME).is_file():
        weight_map = _read_index(folder / INDEX_NAME)
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{folder} lacks {missing[0]}, which {INDEX_NAME} names"
                + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
                + ". Download the model again."
            )
        return WeightFiles(names, weight_map)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise _no_weights(folder)
    return WeightFiles(names, None)


def locate_tensors(
    folder: Path, files: WeightFiles, names_in: Callable[[str], Iterable[str]]
) -> dict[str, str]:
    """The file of each tensor. `names_in` gives the tensors that a file holds.

    Raises `ConfigError` if the index says something else than the files, or if it isn't clear
    which of two files has the tensor.
    """
    found: dict[str, str] = {}
    for file in files.names:
        for tensor in names_in(file):
            other = found.setdefault(tensor, file)
            if other != file:
                raise ConfigError(
                    f"{folder} has the weight '{tensor}' in both {other} and {file}; remove the "
                    "file that doesn't belong to the model."
                )
    for tensor, file in (files.weight_map or {}).items():
        there = found.get(tensor)
        if there != file:
            place = f"which is in {there}" if there else "which no file of the index has"
            raise ConfigError(
                f"{folder / INDEX_NAME} says that {file} has the weight '{tensor}', {place}. "
                "Download the model again."
            )
    return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = set(weight_map.values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} can't be read: {error!r}. Download it again.") from error
    if not names:
        raise ConfigError(f"{index} names no files in its weight_map. Download it again.")
    for name in names:
        if not isinstance(name, str) or name in ("", "..", ".") or Path(name).name != name:
            raise ConfigError(
                f"{index} names the file {name!r}, which isn't plainly in its folder; "
                "download the model again."
            )
    return dict(weight_map)


def _no_weights(folder: Path) -> ConfigError:
    if any(folder.glob("*.gguf")):
        return name_the_file(folder)
    others = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if others:
        return ConfigError(
            f"{folder} has its weights only in {', '.join(others[:3])}; Manta reads "
            "*.safetensors (pickled files can run code). Convert them, e.g. with "
            "transformers' save_pretrained."
        )
    return ConfigError(
        f"{folder} holds no *.safetensors file. Convert weights of other formats, or download the "
        "model again. (A GGUF file of the hub is named as owner/name:Q4_K_M.)"
    )


def name_the_file(folder: Path) -> ConfigError:
    """The error for a folder that has its weights in GGUF files only."""
    files = sorted(path.name for path in folder.glob("*.gguf"))
    return ConfigError(
        f"{folder} holds GGUF files; set `model` to the one to serve, e.g. {folder / files[0]}."
    )
