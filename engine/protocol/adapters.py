"""Adapters (LoRA, Hu et al. 2021) as the roles name them, and the messages about them.

scheduler  --LoadAdapter, DropAdapter-->  every worker  --AdapterLoaded-->  scheduler
engine replica  --PrepareAdapter-->  scheduler  --AdapterPrepared-->  engine replica
"""

from __future__ import annotations

import msgspec


class AdapterRef(msgspec.Struct, frozen=True):
    """One version of an adapter. Roles compare digests; another content is another adapter."""

    name: str
    """Under which clients ask for it."""
    digest: str
    """Hash of its content, in hexadecimal digits."""
    path: str
    """The folder that it was read from."""

    def namespace(self, inner: str = "") -> str:
        """The prefix cache's for its requests, which would be in `inner` without it."""
        return f"{self.digest}\n{inner}"


class LoadAdapter(msgspec.Struct):
    """Read an adapter into the host's memory, beside the steps; answered by `AdapterLoaded`."""

    adapter: AdapterRef


class DropAdapter(msgspec.Struct):
    """Forget an adapter. No step that uses it will follow."""

    digest: str


class AdapterLoaded(msgspec.Struct):
    """A rank has an adapter, or says why not."""

    rank: int
    digest: str
    error: str = ""
    """"" if it has it."""


class AdapterSlot(msgspec.Struct, array_like=True):
    """Which adapter a slot has from a step on."""

    slot: int
    digest: str


class PrepareAdapter(msgspec.Struct, array_like=True):
    """Let the workers read an adapter before a request needs it; answered by `AdapterPrepared` at
    `reply_to`."""

    call: int
    reply_to: str
    adapter: AdapterRef


class AdapterPrepared(msgspec.Struct, array_like=True):
    """The workers have the adapter, or, if `error` isn't empty, can't have it."""

    call: int
    error: str = ""
