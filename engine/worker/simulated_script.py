"""`ScriptedReplies`: outputs of a simulated device that stand in their prompts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.protocol.step import Int64Array, IntArray, ModelWorkerBatch


class Script(NamedTuple):
    """What an output is to be. `begin`: the number of tokens before its first."""

    tokens: IntArray
    begin: int


class ScriptedReplies:
    """The scripts of all rows, read from the prompts as they are computed.

    A token is a function of the tokens before it, as a model's is, so that a request that goes on
    elsewhere goes on alike. A part of a prompt that the prefix cache has isn't seen: configurations
    with scripts set `enable_prefix_cache: false`.
    """

    def __init__(self, mark: int, end: int) -> None:
        """`mark`: the token on both sides of a script; `end`: the token that ends an output."""
        self._mark = mark
        self._end = end
        self._prompts: dict[int, IntArray] = {}
        """By row: the tokens of prompts that are not yet computed to their end."""
        self._scripts: dict[int, Script] = {}

    def read(self, batch: ModelWorkerBatch) -> None:
        """Note the prompts of a step, and the scripts of those that it completes."""
        starts, none = batch.line_starts(), batch.input_ids[:0]
        self._prompts.update((item.row, none) for item in batch.new_rows)
        for line, row in enumerate(batch.req_pool_indices.tolist()):
            known = self._prompts.pop(row, None)
            if known is None:
                continue
            ids = np.concatenate([known, batch.input_ids[starts[line] : starts[line + 1]]])
            if not batch.num_sampled[line]:
                self._prompts[row] = ids
                continue
            marks = np.flatnonzero(ids == self._mark)
            unseen = int(batch.seq_lens[line]) - len(ids)
            if len(marks) < 2:
                self._scripts[row] = Script(ids[:0], unseen + len(ids))
            else:
                first, last = marks[-2:]
                self._scripts[row] = Script(ids[first + 1 : last], unseen + int(last) + 1)

    def tokens(self, rows: IntArray, lens: Int64Array) -> IntArray:
        """int32 [N]: the token behind the first `lens` [N] tokens of each sequence. `rows` [N]."""
        return np.array(
            [self._token(row, n) for row, n in zip(rows.tolist(), lens.tolist(), strict=True)],
            np.int32,
        )

    def _token(self, row: int, num_tokens: int) -> int:
        script = self._scripts.get(row)
        at = 0 if script is None else num_tokens - script.begin
        if script is None or not 0 <= at < len(script.tokens):
            return self._end
        return int(script.tokens[at])
