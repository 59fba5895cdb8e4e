"""`AdapterBoard`: the adapters that were loaded by hand, as all ingresses know them.

They stand in the store of Ray's head, one entry for each: what is there outlives every process of
the server. Engine replicas need not know them: a request carries its adapter.
"""

from __future__ import annotations

from typing import Protocol

from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.protocol import encoding
from engine.protocol.adapters import AdapterRef


class Store(Protocol):
    """Keys and values that outlive the process."""

    def put(self, key: str, value: bytes) -> None:
        """Set a value."""

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""

    def read_all(self, prefix: str) -> dict[str, bytes]:
        """All keys that begin so, with their values."""


class HeadStore:
    """That of Ray's head (GCS)."""

    def put(self, key: str, value: bytes) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(key, value, overwrite=True)

    def delete(self, key: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(key)

    def read_all(self, prefix: str) -> dict[str, bytes]:
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

        keys = [key.decode() for key in _internal_kv_list(prefix)]
        found = {key: _internal_kv_get(key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}


class AdapterBoard:
    """One per ingress. Its methods block, as the store does; they may be called in any thread."""

    def __init__(
        self, catalog: AdapterCatalog, application: str, name: str, model: str, store: Store
    ) -> None:
        """Of the `application` that serves `model` as `name`; those of another don't count."""
        self.catalog, self._store = catalog, store
        # No path and no name has a line end.
        self._prefix = f"manta/adapters/{application}\n{name}\n{model}\n"

    def refresh(self) -> None:
        """Learn what has been loaded and unloaded."""
        found = self._store.read_all(self._prefix)
        self.catalog.loaded = {
            key.removeprefix(self._prefix): encoding.decode([value], AdapterRef)
            for key, value in found.items()
        }

    def add(self, ref: AdapterRef) -> None:
        """Note an adapter."""
        self._store.put(self._prefix + ref.name, encoding.encode_inline(ref))
        self.refresh()

    def remove(self, name: str) -> None:
        """Forget it."""
        self._store.delete(self._prefix + name)
        self.refresh()
