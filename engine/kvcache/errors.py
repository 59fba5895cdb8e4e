"""The one error of this package."""

from __future__ import annotations


class KVPoolError(RuntimeError):
    """The KV bookkeeping was misused or is inconsistent: a double free, a foreign slot, a leak.

    Never raised for a pool that is only full: that is a normal state, for which calls return None.
    """
