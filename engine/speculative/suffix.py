"""Drafts from the request's own tokens and from recent outputs of others (suffix decoding, Oliaro
et al. 2024, with n-gram indexes in place of suffix trees)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.protocol.step import RowParams
from engine.speculative.config import SpeculativeConfig
from engine.speculative.drafter import Drafter
from engine.speculative.ngram import NO_MATCH, Match, NgramIndex

SHORTEST = 3
MAX_TOKENS = 500_000
"""Tokens of all outputs that are kept, some 280 bytes each. The oldest of the namespace that
was used longest ago leave first."""


class OutputStore:
    """The latest outputs of one cache namespace, at most `max_outputs`, those that still grow
    included."""

    def __init__(self, longest: int, max_outputs: int) -> None:
        self._longest, self._max_outputs = longest, max_outputs
        self.outputs: OrderedDict[int, NgramIndex] = OrderedDict()
        self.latest: dict[tuple[int, ...], int] = {}
        """By n-gram: the output that had it last."""
        self._next = 0
        self.num_tokens = 0
        """Of all outputs."""

    def __len__(self) -> int:
        return len(self.outputs)

    def begin(self) -> int:
        """A new output; its number."""
        number, self._next = self._next, self._next + 1
        self.outputs[number] = NgramIndex(SHORTEST, self._longest)
        if len(self.outputs) > self._max_outputs:
            self.drop_oldest()
        return number

    def drop_oldest(self) -> None:
        """Forget the output that began first."""
        number, output = self.outputs.popitem(last=False)
        self.num_tokens -= len(output.tokens)
        for gram in _grams(output.tokens):
            if self.latest.get(gram) == number:
                del self.latest[gram]

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """An output goes on; nothing happens if it was dropped."""
        output = self.outputs.get(number)
        if output is None:
            return
        first = max(len(output.tokens) - SHORTEST, 0)
        output.extend(tokens)
        self.num_tokens += len(tokens)
        for gram in _grams(output.tokens[first:-1]):
            self.latest[gram] = number

    def find(self, ending: Sequence[int]) -> tuple[Match, NgramIndex | None]:
        """The longest end of `ending` in the output that had its last tokens last."""
        number = self.latest.get(tuple(ending[-SHORTEST:]))
        if number is None:
            return NO_MATCH, None
        output = self.outputs[number]
        return output.find(ending), output


class SuffixDrafter(Drafter):
    """The longest match counts; of equal ones that of the request's own tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._own: dict[int, NgramIndex] = {}
        self._outputs: dict[int, tuple[OutputStore, int]] = {}
        """By row: where its output is kept, and its number there."""
        self.stores: OrderedDict[str, OutputStore] = OrderedDict()
        self.num_tokens = 0
        """Of all stores."""

    def install(self, params: RowParams) -> None:
        assert params.token_ids is not None and params.speculation is not None
        depth = self.config.suffix_decoding_max_tree_depth
        tokens = params.token_ids.tolist()
        self._own[params.row] = NgramIndex(SHORTEST, depth, tokens)
        self._outputs.pop(params.row, None)
        if params.speculation.max_len <= len(tokens):
            return  # it wants an embedding
        store = self._store(params.speculation.namespace)
        before = store.num_tokens
        self._outputs[params.row] = (store, store.begin())
        self.num_tokens += store.num_tokens - before  # the oldest output may have left
        self._extend(params.row, tokens[params.prompt_len :])

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        self._own[row].extend(tokens)
        self._extend(row, tokens)

    def _extend(self, row: int, tokens: Sequence[int]) -> None:
        store, number = self._outputs[row]
        before = store.num_tokens
        store.extend(number, tokens)
        self.num_tokens += store.num_tokens - before
        while self.num_tokens > MAX_TOKENS:
            name, oldest = next(iter(self.stores.items()))
            if not len(oldest):
                del self.stores[name]
                continue
            self.num_tokens -= oldest.num_tokens
            oldest.drop_oldest()
            self.num_tokens += oldest.num_tokens

    def propose(self, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self._propose(row, count) for row, count in zip(rows, counts, strict=True)]

    def _propose(self, row: int, count: int) -> list[int]:
        if count <= 0:
            return []
        own, (store, _) = self._own[row], self._outputs[row]
        found, others = own.find(own.tokens), store.find(own.tokens)
        if others[1] is not None and others[0].length > found.length:
            following = others[1].tokens[others[0].position + 1 :][:count]
            if following:
                return following
        return own.after(found.position, count) if found.length else []

    def _store(self, namespace: str) -> OutputStore:
        store = self.stores.get(namespace)
        if store is None:
            config = self.config
            store = OutputStore(
                config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
            )
            self.stores[namespace] = store
        self.stores.move_to_end(namespace)
        return store


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + SHORTEST]) for i in range(len(tokens) - SHORTEST + 1)]
