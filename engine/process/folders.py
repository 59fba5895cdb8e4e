"""The user's folder for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs.unix import Unix

FOLDER_VARIABLE = "MANTA_CACHE_DIR"


def cache_folder() -> Path:
    """`$MANTA_CACHE_DIR`, or `manta` in the user's folder for caches (XDG). Raises `RuntimeError`
    if there is no home folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Unix("manta").user_cache_path
