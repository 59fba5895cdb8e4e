"""`TemplateCache`: compiled grammars, and the errors of those that don't compile."""

from __future__ import annotations

from collections import OrderedDict

from engine.constraints.grammar_template import GrammarTemplate
from engine.errors import RequestError

MAX_ENTRIES = 1024
ERROR_BYTES = 1024

Entry = GrammarTemplate | RequestError


class TemplateCache:
    """The least recently used leave first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` limits the templates kept, at their present sizes. Requests may run with
        others."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, by `GrammarTemplate.num_bytes`."""
        return sum(map(_num_bytes, self._entries.values()))

    def get(self, key: bytes) -> Entry | None:
        """The entry of `key`, which counts as a use; None if it isn't here."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, entry: Entry) -> None:
        """Add an entry, and drop what is too much. One that is too large alone isn't kept."""
        self._entries[key] = entry
        self._entries.move_to_end(key)
        excess = self.num_bytes - self._max_bytes
        while self._entries and (excess > 0 or len(self._entries) > MAX_ENTRIES):
            _, dropped = self._entries.popitem(last=False)
            excess -= _num_bytes(dropped)


def _num_bytes(entry: Entry) -> int:
    return ERROR_BYTES if isinstance(entry, RequestError) else entry.num_bytes
