"""`open_headers`: what the *.safetensors files of a model folder have, read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.files import find_weight_files, locate_tensors
from engine.checkpoint.quantized.headers import TensorHeader, TensorHeaders
from engine.errors import ConfigError


@contextmanager
def open_headers(folder: Path) -> Iterator[TensorHeaders]:
    """The headers of all tensors, while the files are open.

    Raises `ConfigError` if files are missing or damaged, or if it isn't clear which one has a
    tensor.
    """
    headers: dict[str, TensorHeader] = {}
    with ExitStack() as opened:
        files: dict[str, Any] = {}

        def names_in(name: str) -> list[str]:
            file = folder / name
            try:
                at_hand = opened.enter_context(safe_open(str(file), framework="numpy"))
                names = list(at_hand.keys())
                found = {tensor: at_hand.get_slice(tensor) for tensor in names}
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file} can't be read: {error}. Download it again.") from error
            files[name] = at_hand
            for tensor, view in found.items():
                headers[tensor] = TensorHeader(view.get_dtype(), tuple(view.get_shape()))
            return names

        file_of = locate_tensors(folder, find_weight_files(folder), names_in)
        yield TensorHeaders(folder, headers, lambda name: files[file_of[name]].get_tensor(name))
