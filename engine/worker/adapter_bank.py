"""`AdapterBank`: the adapters that a worker has in the host's memory, and those in its slots."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.checkpoint.adapter import WEIGHTS_NAME, PeftAdapter
from engine.checkpoint.adapter_store import open_adapter
from engine.errors import ConfigError
from engine.layers.adapted import AdaptedLinears, Factors
from engine.protocol.adapters import AdapterLoaded, AdapterRef, AdapterSlot
from engine.worker.adapter_tensors import Source, build, find_sources

logger = logging.getLogger(__name__)


class AdapterBank:
    """Adapters come into the host's memory beside the steps, and into a slot with a step.

    The scheduler decides which. It drops none that a step may still use.
    """

    def __init__(
        self,
        linears: AdaptedLinears,
        layers: range,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
    ) -> None:
        """For worker `rank`, whose `linears` are those of `layers` of the model's `num_layers`."""
        self._linears, self._layers, self._num_layers = linears, layers, num_layers
        self._dtype, self._device, self._rank = dtype, device, rank
        self._host: dict[str, dict[str, Factors]] = {}
        """By digest: what this rank has of each linear."""
        self._loading: dict[str, Future[dict[str, Factors]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def load(self, adapter: AdapterRef) -> None:
        """Begin to read an adapter. `take_loaded` says when it is there."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "manta-adapters")
        read = partial(self._read, adapter)
        self._loading[adapter.digest] = self._threads.submit(read)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def take_loaded(self) -> list[AdapterLoaded]:
        """Of the adapters that were read since the last call. One that can't be had costs its
        requests, not the engine. Another thread than that of `load` may ask."""
        done = [digest for digest, future in list(self._loading.items()) if future.done()]
        found = []
        for digest in done:
            future = self._loading.pop(digest)
            error = future.exception()
            if error is None:
                self._host[digest] = future.result()
            found.append(AdapterLoaded(self._rank, digest, "" if error is None else _told(error)))
        return found

    def drop(self, digest: str) -> None:
        """Forget an adapter; a slot that has it keeps it until it gets another one."""
        self._host.pop(digest, None)

    def fill(self, slots: Iterable[AdapterSlot]) -> None:
        """Put adapters into slots, behind the steps launched so far."""
        for item in slots:
            self._linears.set(item.slot, self._host[item.digest])

    def check(self, name: str, folder: Path) -> None:
        """Raise `ConfigError` if the adapter in `folder`, called `name`, isn't one of this model.
        Its numbers aren't read."""
        self._fit(name, PeftAdapter.open(folder))

    def _fit(self, name: str, adapter: PeftAdapter) -> dict[str, list[Source]]:
        """What it has for this rank's projections."""
        try:
            return find_sources(adapter, self._linears, self._is_elsewhere)
        except ConfigError as error:
            base = f", which was made for {adapter.base!r}," if adapter.base else ""
            raise ConfigError(f"the adapter '{name}'{base} doesn't fit: {error}") from error

    def _read(self, ref: AdapterRef) -> dict[str, Factors]:
        """Raises `ConfigError` if the adapter isn't one of this model."""
        adapter = open_adapter(ref)
        found: dict[str, Factors] = {}
        with safe_open(adapter.folder / WEIGHTS_NAME, "pt") as file:

            def read(linear: str) -> tuple[Tensor, Tensor]:
                a, b = (file.get_tensor(tensor).float() for tensor in adapter.tensor_names(linear))
                if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
                    raise ConfigError(
                        f"the adapter '{ref.name}' holds NaN or infinity in the matrices of "
                        f"'{linear}'."
                    )
                return a, b * adapter.linears[linear].scale

            for name, sources in self._fit(ref.name, adapter).items():
                part = self._linears.projections[name]
                found[name] = self._prepared(*part.own(*build(adapter, part, sources, read)))
        return found

    def _prepared(self, a: Tensor, b: Tensor) -> Factors:
        a, b = a.to(self._dtype).contiguous(), b.mT.to(self._dtype).contiguous()
        return (a.pin_memory(), b.pin_memory()) if self._device.type == "cuda" else (a, b)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether another pipeline stage may have a linear."""
        numbers = [int(word) for word in name.split(".") if word.isdecimal() and len(word) < 6]
        return bool(numbers) and numbers[0] < self._num_layers and numbers[0] not in self._layers


def _told(error: BaseException) -> str:
    """Why an adapter can't be had, for whoever asks for it. It costs its requests, not the engine,
    whatever its file holds."""
    if isinstance(error, ConfigError | OSError):
        return str(error)
    logger.error("an adapter can't be read", exc_info=error)
    return f"the adapter can't be read ({type(error).__name__})"
