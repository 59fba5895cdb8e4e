"""The folder with the `configs/` and `models/` that Manta brings."""

from __future__ import annotations

from pathlib import Path


def shipped_root() -> Path:
    """The repository. If Manta was installed from a wheel: the folder that `setup.py` made."""
    root = Path(__file__).resolve().parents[2]
    packed = root / "manta_files"
    return packed if packed.is_dir() else root
