"""Which GGUF file of a repository of the hub is meant by `owner/name:Q4_K_M`."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import ConfigError

NAMED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+):(?P<tag>[\w.-]+)")
_OTHER_PARTS = "mmproj"
"""How files begin that hold another part of a model: what it sees with."""


def patterns(tag: str) -> list[str]:
    """What files of the `tag` are called, for `snapshot_download`."""
    spelled = sorted({tag, tag.lower(), tag.upper()})
    forms = ("{}.gguf", "*[-._/]{}.gguf", "*[-._/]{}-?????-of-?????.gguf")
    return [form.format(word) for word in spelled for form in forms]


def find_file(folder: Path, name: str, tag: str) -> Path:
    """The first file of the `tag` in the folder that the repository `name` was fetched into.

    Raises `ConfigError` if there is none, or files of several models.
    """
    form = re.compile(rf"(?:.*[-._])?{re.escape(tag)}(-(\d{{5}})-of-\d{{5}})?\.gguf", re.I)
    found = [
        file
        for file in sorted(folder.rglob("*.gguf"))
        if (match := form.fullmatch(file.name))
        and match[2] in (None, "00001")
        and not file.name.startswith(_OTHER_PARTS)
    ]
    if not found:
        raise ConfigError(
            f"the hub's '{name}' has no GGUF file of the type {tag}, or the hub can't be reached "
            "to fetch it; its page lists those that there are."
        )
    if len(found) > 1:
        files = ", ".join(str(file.relative_to(folder)) for file in found[:3])
        raise ConfigError(
            f"the hub's '{name}' has several files of the type {tag} ({files}); download one and "
            "set `model` to its path."
        )
    return found[0]
