"""Keys files for tests. A key's text is its name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **fields}


def write_keys(path: Path, *entries: dict[str, Any]) -> str:
    """Write the file as Kubernetes does: a new file in the old one's place."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"keys": list(entries)}))
    new.replace(path)
    return str(path)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}
