"""What can be known of this machine before a server starts on it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from deploy.http.access.listening import is_loopback
from deploy.start.devices import check_devices, draft_model
from deploy.start.target import Target
from engine.checkpoint.gguf.folder import is_gguf_folder, open_checkpoint
from engine.checkpoint.quantization import format_of, stored_matrices
from engine.checkpoint.tensor_headers import open_headers
from engine.tokenizer.loading import check_tokenizer_files

SHARED_MEMORY_BYTES = 64 << 20
"""The least of /dev/shm that Ray's object store needs; with less it moves to the disk."""


def check_machine(target: Target) -> list[str]:
    """What to tell the user, in sentences. Raises `ConfigError` where the start can't succeed."""
    warnings: list[str] = []
    host = str(target.http["host"])
    for app in target.applications:
        for model in (app.resolved.model, draft_model(app)):
            if model is not None and app.engine.load_format == "auto":
                check_weights(Path(model.path))
    if sys.platform == "linux":
        warnings += check_devices(target.applications)
    for app in target.applications:
        check_tokenizer_files(Path(app.resolved.model.path))
    if not is_loopback(host) and not target.http.get("ssl_certfile"):
        warnings.append("what clients send crosses the network unencrypted, keys too, without TLS")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < SHARED_MEMORY_BYTES:
        warnings.append(
            "/dev/shm has less than 64 MiB (in Docker: --shm-size 2g); Ray uses the disk instead"
        )
    return warnings


def check_weights(folder: Path) -> None:
    """Raise `ConfigError` unless the model folder has all its weights in complete files, plain or
    quantized in a way that can be read."""
    if is_gguf_folder(folder):
        open_checkpoint(folder)
        return
    with open_headers(folder) as headers:
        stored_matrices(format_of(folder), headers)
