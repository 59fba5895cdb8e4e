"""`GgufCheckpoint`: the files of one model, which may be split over several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.gguf.header import GgufTensor, read_header
from engine.checkpoint.values import ConfigValues
from engine.errors import ConfigError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint(NamedTuple):
    """Metadata of the first file, and the tensors of all."""

    metadata: ConfigValues
    tensors: dict[str, GgufTensor]


def part_files(file: Path) -> tuple[Path, ...]:
    """All files of the model that `file` belongs to, in order. Raises `ConfigError` if one is
    missing."""
    split = _PART.fullmatch(file.name)
    if split is None:
        return (file,)
    base, count = split[1], int(split[3])
    if not 1 <= int(split[2]) <= count:
        raise ConfigError(f"{file} is no part of {count}: its name is wrong.")
    parts = []
    for number in range(1, count + 1):
        part = file.with_name(f"{base}-{number:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise ConfigError(
                f"{part} is missing: the model is split into {count} files, which must lie in one "
                "folder. Download it too."
            )
        parts.append(part)
    return tuple(parts)


def read_checkpoint(files: tuple[Path, ...]) -> GgufCheckpoint:
    """Read the headers of a model's files, which are those of `part_files`.

    Raises `ConfigError` if a file can't be read or they don't belong together.
    """
    first, *others = (read_header(file) for file in files)
    metadata = ConfigValues(files[0], first.metadata, {"split.count": 1})
    count = metadata.count("split.count")
    if count not in (0, len(files)):
        raise ConfigError(
            f"{files[0]} says that it is one of {count} files; keep the names that they were made "
            "with, such as model-00001-of-00003.gguf."
        )
    tensors = dict(first.tensors)
    for file, header in zip(files[1:], others, strict=True):
        if ConfigValues(file, header.metadata, {}).count("split.count") != count:
            raise ConfigError(f"{file} doesn't belong to {files[0].name}. Download both again.")
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise ConfigError(
                f"{file} has the tensor {min(twice)!r}, which another file has, too. Download all "
                "files of the model again."
            )
        tensors |= header.tensors
    total = metadata.optional_size("split.tensors.count")
    if total not in (None, len(tensors)):
        raise ConfigError(
            f"{files[0]} says that the model has {total} tensors, and its files hold "
            f"{len(tensors)}. Download them again."
        )
    return GgufCheckpoint(metadata, tensors)
