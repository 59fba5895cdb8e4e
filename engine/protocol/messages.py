"""Messages between the roles: msgspec structs with numpy arrays, never pickle.

    engine replica, engine.LLM  --AddRequest, AbortRequest-->  scheduler
    scheduler  --ModelWorkerBatch-->  workers  --GenerationBatchResult-->  scheduler
    scheduler  --StepOutputs, one per step and reader-->  reader (tokenizer, engine.LLM)

`engine.protocol.encoding` turns them into bytes.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from engine.protocol.sequence import TokenSequence
from engine.protocol.step import TokenLogprobs


class AddRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request as the scheduler receives it.

    Its outputs go to the inbox at `reply_to` ("" = in process), the request's reader. `rid` is
    unique per reader. `output_ids` are tokens that the request already emitted elsewhere (resume):
    they count as output for limits, penalties and seeds, and are not sent again.
    """

    rid: int
    sequence: TokenSequence
    reply_to: str = ""
    owner: str = ""
    """Address that is told of the end by `RequestsDone` (the engine replica's), if any."""
    output_ids: np.ndarray | None = None
    page_hashes: np.ndarray | None = None
    """uint64 [at most pages of input and output]: `engine.kvcache.hash_pages` of the first whole
    pages. A router that needed them computed them; the prefix cache reuses them."""


class AbortRequest(msgspec.Struct, kw_only=True):
    """End a request in any state. Its reader gets nothing more of it, not even its end.

    Sent when nobody reads the request any more, and when the detokenizer has found a stop string.
    """

    rid: int
    reply_to: str = ""


class FinishedReq(msgspec.Struct, array_like=True):
    """End of one request. `reason`: "stop", "length", "abort" or "error".

    `matched_token`: the eos or stop token that ended it. `message`, `status` and `param` are set
    for errors.
    """

    rid: int
    reason: str
    num_prompt: int
    num_output: int
    num_cached: int
    matched_token: int | None = None
    message: str = ""
    status: int = 0
    param: str | None = None
    num_predicted: int = 0
    """Output tokens that were drafts from the client's prediction."""


class StepOutputs(msgspec.Struct, array_like=True):
    """What one step gave to one reader: the tokens of each request, then the ends."""

    step: int
    rids: list[int]
    """[N]"""
    token_ids: list[int]
    """[N]; with `counts` those of a request one after the other, [sum(counts)]."""
    finished: list[FinishedReq]
    started: list[tuple[int, int, float]]
    """(rid, cached prompt tokens, seconds in the queue until the first admission) of requests whose
    first token or embedding is in this message."""
    logprobs: dict[int, TokenLogprobs] | None = None
    """Log-probabilities by index into `token_ids`."""
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] | None = None
    """By rid, for the whole prompt; sent with the first token. The first entry is None."""
    scheduler: str = ""
    """Address of the scheduler's inbox, set when requests start; aborts go there."""
    embeddings: dict[int, bytes] | None = None
    """By rid, as in `GenerationBatchResult`; these requests end with this message."""
    counts: list[int] | None = None
    """[N]: tokens of each request; None: one each."""


class RequestsDone(msgspec.Struct, array_like=True):
    """Requests of one owner that ended, for any reason."""

    rids: list[tuple[str, int]]
    """(reply_to, rid)"""


class FlushCache(msgspec.Struct, array_like=True):
    """Ask a scheduler to empty its prefix cache; answered by `CacheFlushed` at `reply_to`."""

    call: int
    reply_to: str


class CacheFlushed(msgspec.Struct, array_like=True):
    """The prefix cache is empty, or, if `refusal` isn't empty, says why it isn't."""

    call: int
    refusal: str = ""


class Shutdown(msgspec.Struct):
    """Ask a role to finish what it holds and leave its loop."""


class WorkerReady(msgspec.Struct):
    """A worker loaded its shard and takes steps from now on."""

    rank: int
    address: str
    """Address of the inbox that it takes steps from."""
    num_kv_tokens: int = 0
    """Size of its KV cache, the same on every rank."""
    error: str = ""
    """Why the worker can't take steps; "" if it can."""


class ExpertTokens(msgspec.Struct):
    """How many tokens the experts of a pipeline stage got since it was ready."""

    by_layer: dict[int, list[int]]
    """By decoder layer: [experts]."""


class ReaderGone(msgspec.Struct):
    """All requests with this `reply_to` are to be aborted: nobody reads their output."""

    reply_to: str


class RequestTaken(msgspec.Struct, array_like=True):
    """An engine replica tells an ingress that it handed a request to its scheduler."""

    rid: int
    replica: str
    """Address of the replica's inbox."""


class Ping(msgspec.Struct, array_like=True):
    """An ingress asks an engine replica whether it lives, and says that it lives itself."""

    reply_to: str


class Pong(msgspec.Struct, array_like=True):
    """Answer to `Ping`: who the replica is, and how to end it should it hang."""

    replica: str
    """Address of its inbox."""
    actor: str
    """Name of its actor."""
    namespace: str
    node_id: str
    pid: int
    started: int
    """When the process started, in the kernel's clock ticks; 0 if unknown."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Pages entered the tree: a chain, each the parent of the next.

    parent_hash is the page before the first one, or the namespace's root hash.
    """

    seq: int
    block_hashes: list[int]
    parent_hash: int
    namespace: str


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages left the tree, in any order; pages that extended them have left too."""

    seq: int
    block_hashes: list[int]


class AllCleared(msgspec.Struct, frozen=True, tag=True):
    """The tree is empty."""

    seq: int


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllCleared


class SubscribeKVEvents(msgspec.Struct, array_like=True):
    """A router asks for the contents of the prefix cache, now and from now on.

    The answer is a `KVSnapshot`, also if the router asks again (after a gap in the numbers).
    """

    reply_to: str
    replica: str = ""
    """Address of the engine replica's inbox; the replica fills it in. Snapshot and events carry
    it."""


class UnsubscribeKVEvents(msgspec.Struct, array_like=True):
    """The subscriber at `reply_to` is gone: send it nothing more."""

    reply_to: str


class KVSnapshot(msgspec.Struct, array_like=True):
    """All pages in the prefix cache after event `seq`."""

    replica: str
    epoch: int
    """Larger for a scheduler that was started again."""
    seq: int
    page_hashes: np.ndarray
    """uint64 [P]."""


class KVEvents(msgspec.Struct, array_like=True):
    """What has changed in the prefix cache: numbered events, without gaps within an epoch.

    A message without events says that there were none.
    """

    replica: str
    epoch: int
    seq: int
    """Number of the last event so far."""
    events: list[KVEvent]


class IngressMetrics(msgspec.Struct, array_like=True):
    """What an ingress measured, as families of Prometheus' text format: name, kind, help, samples.
    `number` is that of the question."""

    ingress: str
    number: int
    families: list[tuple[str, str, str, str]]
