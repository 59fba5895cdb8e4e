"""One step: the message that workers get, and the result that comes back.

A step is *lines*, one for each request in it. `query_lens` says how many tokens a line has, and
`num_sampled` behind how many of its last ones a token is sampled.

Words: a *row* is one of `ReqToTokenPool`, a *slot* one of the KV cache, a *line* a place in a step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from engine.protocol.adapters import AdapterSlot
from engine.protocol.sampling_params import SamplingParams

IntArray = np.ndarray[Any, np.dtype[np.int32]]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]


class ForwardMode(IntEnum):
    """What the lines of a step are: chunks of prompts (EXTEND), decodes, with drafts or without
    (DECODE), or both. A chunk of one token that ends its prompt is a decode like any other."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3


class RowSpeculation(msgspec.Struct, array_like=True):
    """What drafting needs to know of a request that takes a row."""

    max_len: int
    """Tokens of prompt and output that the request may have in all."""
    namespace: str
    """Of the prefix cache: requests of other namespaces must not see its outputs."""
    prediction: np.ndarray | None = None
    """int32 [n]: the output that its client expects."""


class RowParams(msgspec.Struct, array_like=True):
    """Sampling state that a worker installs in a row of `ReqToTokenPool`.

    Sent once when a request takes the row. `token_ids` (prompt and output so far) is only filled
    if penalties or drafters need it.
    """

    row: int
    prompt_len: int
    eos_token_ids: list[int]
    params: SamplingParams
    token_ids: np.ndarray | None = None
    speculation: RowSpeculation | None = None
    """Set if the engine speculates."""


class PooledLines(msgspec.Struct, array_like=True):
    """Lines of a step whose requests want an embedding. None of them samples a token.

    The step gives E vectors: one for each of `last`, then one for each of `mean_ends`.
    """

    last: np.ndarray
    """int32 [L]: lines that end their prompt; the hidden state of its last token is the vector."""
    mean: np.ndarray
    """int32 [M]: lines whose hidden states count for a mean. Their prompts are computed from the
    first token on, and of all requests at most one is between its first and last chunk."""
    mean_ends: np.ndarray
    """int32 [E - L]: those of `mean` that end their prompt."""


class ForcedRun(msgspec.Struct, array_like=True):
    """Tokens that a constraint leaves no choice about, as far as is known (guesses)."""

    length: int
    """Tokens of prompt and output before them, when this was known."""
    tokens: list[int]

    def drafts(self, length: int, last: int, most: int, limit: int) -> list[int]:
        """At most `most` of them that are still to come in a sequence of `length` tokens that ends
        in `last` and may have `limit`; none if it went another way. The scheduler makes masks for
        the drafts that the worker checks, so both ask here."""
        passed = length - self.length
        most = max(0, min(most, limit - length - 1))
        if passed > 0 and (passed > len(self.tokens) or self.tokens[passed - 1] != last):
            return []
        return self.tokens[passed : passed + most]


class LateLines(msgspec.Struct, array_like=True):
    """The last R lines of a step, whose lengths and tokens the scheduler didn't know, because the
    step before was in flight.

    Their `query_lens` and `num_sampled` are the most that they may have, the step has no
    `input_ids` and `out_cache_loc` for them, and their `seq_lens` mean nothing: the worker fills
    all of these in (`engine.speculative.step_filler`).
    """

    slots: np.ndarray
    """int32 [sum(counts)]: KV slots of the positions that the lines may reach, line after line."""
    starts: np.ndarray
    """int32 [R]: the first of these positions."""
    counts: np.ndarray
    """int32 [R]: their number."""
    forced: dict[int, ForcedRun] | None = None
    """By number among the R: where a line's drafts come from, if it has a constraint."""


class ModelWorkerBatch(msgspec.Struct, array_like=True):
    """One step: what every worker needs to run it and nothing that it already has.

    B lines, T tokens in all, S lines that sample. Lines of several tokens stand before the decodes.

    Prefill, decode and the check of drafts are what `query_lens` and `num_sampled` say, not kinds:
    a chunk of a prompt samples nothing or one token, a decode has one token and samples one, a line
    that checks k drafts has 1 + k and samples as many.
    """

    step: int
    micro_batch: int
    req_pool_indices: np.ndarray
    """int32 [B]: row of `ReqToTokenPool`; also that of sampling state and `FutureMap`."""
    query_lens: np.ndarray
    """int32 [B]: tokens of each line in this step."""
    num_sampled: np.ndarray
    """int32 [B]: behind how many of its last tokens a line samples. 0: a chunk that doesn't end its
    prompt, or a request for an embedding. 1 + k: its last k tokens are drafts. What is kept is
    everything up to and with the first token that is not the draft at its place."""
    seq_lens: np.ndarray
    """int32 [B]: tokens in the KV cache once the step is done."""
    input_ids: np.ndarray
    """int32 [T]; -1 = the last token of the line's row, from the worker's `FutureMap`."""
    out_cache_loc: np.ndarray
    """int32 [T]: KV slot of each token."""
    prefix_rows: np.ndarray
    """int32 [P]: rows whose prefix changed since the worker last saw them."""
    prefix_lens: np.ndarray
    """int32 [P]: tokens of that prefix."""
    prefix_locs: np.ndarray
    """int32 [sum(prefix_lens)]: KV slots of those prefixes, concatenated."""
    new_rows: list[RowParams]
    next_prompt_ids: np.ndarray | None = None
    """int32 [B]: the prompt token behind each line's tokens, -1 behind the prompt's last, -2 in
    lines that want no prompt log-probabilities. None: no line does."""
    delayed_sample: bool = False
    """A line that samples is constrained: launch the forward, sample when the step's `SampleMasks`
    comes."""
    pooled: PooledLines | None = None
    """Set if lines of the step are pooled."""
    late: LateLines | None = None
    """Set if the worker has to fill lines in. Without it, the step is complete."""
    window_pages: np.ndarray | None = None
    """int32 [2, n]: pages of the KV cache, and where layers with windows have each from this step
    on (`engine.kvcache.window_pages`). None: nothing changed."""
    drafts_wanted: int = 0
    """The most drafts of each sampled line's next step that the result shall bring."""
    adapters: np.ndarray | None = None
    """int32 [B]: the slot of each line's adapter, -1 for none. None: no line has one."""
    adapter_slots: list[AdapterSlot] | None = None
    """Slots that have another adapter from this step on."""

    @property
    def sampled_lines(self) -> Int64Array:
        """int64 [S]"""
        return np.flatnonzero(self.num_sampled)

    @property
    def run_lens(self) -> Int64Array:
        """int64 [S]: behind how many tokens each of these lines samples."""
        return self.num_sampled[self.num_sampled > 0].astype(np.int64)

    def sampled_tokens(self, starts: Int64Array) -> Int64Array:
        """int64 [sum(num_sampled)]: which tokens of a complete step are sampled behind. `starts`:
        its `line_starts()`."""
        counts = self.num_sampled.astype(np.int64)
        # Of each of a line's last tokens, how many stand behind it.
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(counts.sum())
        tokens: Int64Array = np.repeat(starts[1:], counts) - 1 - behind
        return tokens

    @property
    def checks_drafts(self) -> bool:
        """Whether a line samples behind several tokens."""
        return bool((self.num_sampled > 1).any())

    @property
    def num_long(self) -> int:
        """The first lines, up to the last that has several tokens: those that attend as a chunk
        does. The others decode."""
        long = np.flatnonzero(self.query_lens > 1)
        return int(long[-1]) + 1 if len(long) else 0

    @property
    def forward_mode(self) -> ForwardMode:
        """Derived from the lines: a decode samples behind all of its tokens, a chunk doesn't."""
        is_chunk = self.query_lens > self.num_sampled
        if not is_chunk.any():
            return ForwardMode.DECODE
        return ForwardMode.EXTEND if is_chunk.all() else ForwardMode.MIXED

    def line_starts(self) -> Int64Array:
        """int64 [B + 1]: where each line's tokens start, and the last one's end, among the T of a
        complete step."""
        starts = np.zeros(len(self.query_lens) + 1, np.int64)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts


class SampleMasks(msgspec.Struct, array_like=True):
    """Tokens that the constrained lines of a step may sample; they complete a delayed sample.

    Sent once the tokens before them are known. K masks; lines not named may sample any token.
    """

    step: int
    lines: np.ndarray
    """int32 [K]: of the step's S sampled lines; one with drafts once for each of its tokens."""
    masks: np.ndarray
    """uint32 [K, ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if token t is allowed."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probability of one token and of `k` others: the likeliest, best first, or listed ones.

    `rank` of the token is 1 for the likeliest; 0 if it wasn't computed.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of prompt tokens [start, start+len) of the request in line `line`."""

    line: int
    start: int
    logprobs: list[TokenLogprobs]


class GenerationBatchResult(msgspec.Struct, array_like=True):
    """Result of one step, from the last pipeline stage's first tensor-parallel rank."""

    step: int
    next_token_ids: list[int]
    """[S], of the lines that sample; with `num_tokens` those of a line one after the other,
    [sum(num_tokens)]."""
    logprobs: list[TokenLogprobs | None] | None = None
    """As `next_token_ids`, if any sampled line asked for log-probabilities."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    line_errors: dict[int, str] | None = None
    """Why a request can't go on (NaN logits), by index into the sampled lines."""
    error: str | None = None
    """Set if the step failed: the engine can't go on."""
    device_s: float | None = None
    """Seconds that the last stage was busy with the step."""
    period_s: float | None = None
    """The same with what the host did since the step before; only if the engine speculates."""
    embeddings: list[bytes] | None = None
    """[E] if lines were pooled, in the order of `PooledLines`: float32 [hidden], little-endian; ""
    if it held NaN or infinity."""
    num_tokens: list[int] | None = None
    """[S]: tokens that each line gave: 1 + accepted drafts, fewer if it failed (`line_errors`).
    None: one each, no drafts were checked."""
    num_drafts: list[int] | None = None
    """[S]: drafts that were checked; set together with `num_tokens`."""
    drafts: list[list[int]] | None = None
    """[S]: for each sampled line's next step, if asked for (`drafts_wanted`)."""


def positions(starts: np.ndarray, counts: np.ndarray) -> Int64Array:
    """int64 [sum(counts)]: starts[i], starts[i] + 1, ... for each of the [n] runs."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    at: Int64Array = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return at
