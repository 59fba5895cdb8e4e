"""Parts of a step's message and of its result that only some steps have."""

from __future__ import annotations

import msgspec
import numpy as np


class SlotSpeculation(msgspec.Struct, array_like=True):
    """What drafting needs to know of a request that takes a slot."""

    max_len: int
    """Tokens of prompt and output that the request may have in all."""
    namespace: str
    """Of the prefix cache: requests of other namespaces must not see its outputs."""
    prediction: np.ndarray | None = None
    """int32 [n]: the output that its client expects."""


class PooledRows(msgspec.Struct, array_like=True):
    """Extend rows of a step whose requests want an embedding. None of them samples a token.

    The step gives E vectors: one for each of `last`, then one for each of `mean_ends`.
    """

    last: np.ndarray
    """int32 [L]: rows that end their prompt; the hidden state of its last token is the vector."""
    mean: np.ndarray
    """int32 [M]: rows whose hidden states count for a mean. Their prompts are computed from the
    first token on, and of all requests at most one is between its first and last chunk."""
    mean_ends: np.ndarray
    """int32 [E - L]: those of `mean` that end their prompt."""


class ForcedRun(msgspec.Struct, array_like=True):
    """Tokens that a row's constraint leaves no choice about, as far as is known (guesses)."""

    length: int
    """Tokens of prompt and output before them, when this was known."""
    tokens: list[int]

    def drafts(self, length: int, last: int, most: int, limit: int) -> list[int]:
        """At most `most` of them that are still to come in a row of `length` tokens that ends in
        `last`, and may have `limit`; none if the row went another way. The scheduler makes masks
        for the drafts that the worker checks, so both ask here."""
        passed = length - self.length
        most = max(0, min(most, limit - length - 1))
        if passed > 0 and (passed > len(self.tokens) or self.tokens[passed - 1] != last):
            return []
        return self.tokens[passed : passed + most]


class VerifyRows(msgspec.Struct, array_like=True):
    """The decode rows of a step that checks drafts, R = B - num_extend of them.

    The inputs of a row are its last token and its drafts. Each of these tokens samples one, and
    what is kept is everything up to and with the first token that is not the draft at its place.

    If `slots` is None, the step is complete. Otherwise the scheduler didn't know the rows' lengths
    and tokens, because the step before was in flight. Then `num_drafts` are the most that a row
    may have, the step has no `input_ids` and `out_cache_loc` for these rows, and their `seq_lens`
    mean nothing: the worker fills them in (`engine.speculative.step_filler`).
    """

    num_drafts: np.ndarray
    """int32 [R]"""
    slots: np.ndarray | None = None
    """int32 [sum(slot_counts)]: KV slots of the positions that the rows may reach, one row after
    the other."""
    slot_starts: np.ndarray | None = None
    """int32 [R]: the first of these positions."""
    slot_counts: np.ndarray | None = None
    """int32 [R]: their number."""
    forced: dict[int, ForcedRun] | None = None
    """By number of the row: where its drafts come from, if it has a constraint."""


class VerifiedRows(msgspec.Struct, array_like=True):
    """What became of the drafts of a step, for each of its S sampled rows."""

    num_tokens: list[int]
    """Tokens that the row gave: 1 + accepted drafts; fewer if it failed (`row_errors`)."""
    num_drafted: list[int]
    """Drafts that were checked."""
