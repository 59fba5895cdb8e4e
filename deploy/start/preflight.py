"""What can be known of this machine before a server starts on it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

from deploy.http.access.listening import is_loopback
from deploy.start.devices import check_devices, draft_model
from deploy.start.target import Target
from engine.errors import ConfigError
from engine.quantization import refuse_quantized_tensors
from engine.tokenizer.loading import check_tokenizer_files

SHARED_MEMORY_BYTES = 64 << 20
"""The least of /dev/shm that Ray's object store needs; with less it moves to the disk."""
_INDEX = "model.safetensors.index.json"


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
    """Raise `ConfigError` unless the model folder has all its weights in complete files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no *.safetensors file. Convert weights of other formats, or download "
            "the model again."
        )
    index = folder / _INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"{index} can't be read: {error!r}. Download it again.") from error
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise ConfigError(
                f"{folder} lacks {missing[0]}, which {_INDEX} names"
                + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
                + ". Download the model again."
            )
    for file in files:
        try:
            with safe_open(str(file), framework="numpy") as opened:
                names = list(opened.keys())
                types = {name: opened.get_slice(name).get_dtype() for name in names}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} can't be read: {error}. Download it again.") from error
        refuse_quantized_tensors(folder, types)
