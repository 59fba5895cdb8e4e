"""`Req`: one request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from engine.constraints import Constraint
from engine.errors import RequestError
from engine.protocol.messages import FinishedReq
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import IntArray, PromptLogprobs, TokenLogprobs

if TYPE_CHECKING:
    from engine.kvcache import TreeNode


class ReqStatus(Enum):
    """Where a request is. RETRACTING: it leaves the batch once no step in flight holds it."""

    WAITING = "waiting"
    RUNNING = "running"
    RETRACTING = "retracting"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Req:
    """A request and its place in the KV cache.

    Regions of its row in `ReqToTokenPool`, all in tokens:
      [0, cached_len)       owned by the radix tree, locked through `last_node`; page-aligned
      [cached_len, kv_len)  owned by the request
      [kv_len, alloc_len)   owned by the request, for drafts; what they hold counts for nothing
      [alloc_len, ...)      nothing yet
    `kv_len` counts launched tokens: the steps in flight that write them may not have run. While
    drafts are in flight it counts the least that they will be.
    `output_ids` holds committed tokens only, never placeholders.
    """

    rid: int
    reply_to: str
    sequence: TokenSequence
    max_new_tokens: int
    """Output tokens in all, resumed ones included; 0 if it wants an embedding."""
    stop_ids: frozenset[int]
    """Token ids that end the request: eos (unless ignored), and stop_token_ids unless it may begin
    with a thought."""
    reader_no: int = 0
    """`reply_to` as a small number, for grouping outputs."""
    page_hashes: list[int] = field(default_factory=list)
    """Hashes of the first whole pages of prompt and output, as far as the router computed them."""
    arrival: float = 0.0
    deadline: float | None = None
    queue_deadline: float | None = None
    constraint: Constraint | None = None
    """Its state follows `output_ids`, so it doesn't know tokens in flight."""

    output_ids: list[int] = field(default_factory=list)
    status: ReqStatus = ReqStatus.WAITING
    fill_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt + output at the last admission: what prefill has to put into the cache."""
    req_pool_idx: int = 0
    """Row of `ReqToTokenPool`; 0 = none (row 0 is padding)."""
    adapter_slot: int = -1
    """Slot of its adapter while it has a row; -1: it has none."""
    cached_len: int = 0
    kv_len: int = 0
    alloc_len: int = 0
    """Below `kv_len` if the request has no slots for drafts."""
    last_loc: int = 0
    """Slot of the last token of its last launched chunk."""
    last_node: TreeNode | None = None
    prefix_indices: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Slots of the cached prefix, between match and admission."""
    installed: bool = False
    """Whether workers have its sampling state and cached prefix for the row that it holds."""
    started: bool = False
    """Whether its first token since it came to this engine, or its embedding, was sent."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at its first admission."""
    queue_s: float = 0.0
    """Seconds from its arrival to its first admission."""
    lacks_room_since: int | None = None
    """Of a flex request, until its prompt is launched: number of the step behind which it first
    lacked room."""
    gave_way_at: int = 0
    """Launched tokens when it last gave way to another key's prompt."""
    keeps_place: bool = False
    """Whether it doesn't give way (again)."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_predicted: int = 0
    """Output tokens that were drafts from the prediction."""
    drafts: list[int] = field(default_factory=list)
    """For its next step, where results carry drafts, or its constraint gives them."""
    refusal: RequestError | None = None
    """Why its own fields end it."""
    num_delayed: int = 0
    """Steps launched so far that waited or wait for its masks."""
    num_accepted: int = 0
    """Those of them whose tokens its constraint has seen."""

    @property
    def origin_input_ids(self) -> IntArray:
        """Its prompt."""
        return self.sequence.prompt_ids

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, without output."""
        return len(self.sequence.prompt_ids)

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.sequence.params

    @property
    def pooling(self) -> Pooling | None:
        """Set if it wants an embedding: it ends when its prompt is computed."""
        return self.sequence.pooling

    @property
    def is_flex(self) -> bool:
        """Whether it ranks below all others."""
        return self.sequence.is_flex

    @property
    def key_name(self) -> str:
        """Name of its API key; "" if the server has none."""
        key = self.sequence.key
        return "" if key is None else key.name

    @property
    def slots_len(self) -> int:
        """Positions of its row that have slots."""
        return max(self.kv_len, self.alloc_len)

    @property
    def finished(self) -> bool:
        """Whether its end was decided; its memory may still be in use by a step in flight."""
        return self.status is ReqStatus.FINISHED

    @property
    def needs_prefill(self) -> bool:
        """Whether part of `fill_ids` isn't launched yet (a chunked request)."""
        return self.kv_len < len(self.fill_ids)

    def begin_round(self) -> None:
        """Set what prefill must cover; called at admission."""
        if self.output_ids:
            out = np.asarray(self.output_ids, np.int32)
            self.fill_ids = np.concatenate([self.origin_input_ids, out])
        else:
            self.fill_ids = self.origin_input_ids
        self.prompt_logprobs = []

    def finish(
        self,
        reason: str,
        matched_token: int | None = None,
        message: str = "",
        status: int = 0,
        param: str | None = None,
    ) -> FinishedReq:
        """The message for its reader if the request ends now for `reason`."""
        return FinishedReq(
            self.rid,
            reason,
            self.prompt_len,
            len(self.output_ids),
            self.num_cached or 0,
            matched_token,
            message,
            status,
            param,
            num_predicted=self.num_predicted,
        )

    def fail(self, message: str) -> FinishedReq:
        """The same if a step failed it: a grammar that can't go on is its client's affair, and so
        are fields that leave no token."""
        if self.refusal is not None:
            found = self.refusal
            return self.finish("error", None, found.message, found.status, found.param)
        refusal = self.constraint.error if self.constraint is not None else ""
        if not refusal:
            return self.finish("error", message=message, status=500)
        spec = self.params.constraint
        field = spec.field if spec is not None else ""
        return self.finish("error", message=refusal, status=400, param=field or None)

    def refuse(self, fields: Sequence[str]) -> None:
        """Note that these fields leave no token together; "" is a grammar that no field names."""
        leave = "leave no token together" if len(fields) > 1 else "leaves no token"
        names = " and ".join(name or "the grammar" for name in fields)
        self.refusal = RequestError(
            f"{names} {leave} that could be sampled here",
            next(filter(None, fields), None),
        )

    def add_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Keep the log-probabilities of a chunk; chunks come in order."""
        if found.start == 0:
            self.prompt_logprobs.append(None)  # nothing is before the first token
        self.prompt_logprobs.extend(found.logprobs)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are still to be computed; the prefix cache has none."""
        return self.params.prompt_logprobs is not None and not self.started

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token has to be computed, so that the prefix cache is of no use."""
        return self.pooling == "mean" or self.wants_prompt_logprobs
