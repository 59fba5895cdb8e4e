"""The user's folder for what can be made again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from platformdirs.unix import Unix

FOLDER_VARIABLE = "MANTA_CACHE_DIR"


def cache_folder() -> Path:
    """`$MANTA_CACHE_DIR`, or `manta` in the user's folder for caches (XDG). Raises `RuntimeError`
    if there is no home folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Unix("manta").user_cache_path


def move_into_place(made: Path, folder: Path) -> None:
    """Call the folder `made` by its name, `folder`. If there is one already, which another process
    has made of the same, that stays, and so does `made`. Raises `OSError`."""
    try:
        made.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
