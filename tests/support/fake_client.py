"""An `EngineClient` without an engine: bytes are tokens, outputs are a function of the seed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from deploy.http.engine_client import (
    EngineClient,
    EngineHealth,
    EngineStatus,
    ModelInfo,
    ReplicaStatus,
    RoleStatus,
)
from engine.constraints import ConstraintSpec, verify_constraint
from engine.errors import RequestError
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import Conversation, LogprobEntry, TextDelta
from engine.tokenizer.tokenizer import check_template_kwargs, normalize_message
from engine.trace import RoleTrace, StepSpan, TraceRing, scheduler_trace
from tests.support.model_info import model_info

BOS, EOS = 256, 257
HIDDEN = 8
SPECIAL = {BOS: "<s>", EOS: "</s>"}


def token_text(token: int) -> str:
    return SPECIAL.get(token) or bytes([token % 256]).decode(errors="replace")


def expected_ids(seed: int, n: int) -> list[int]:
    """The lower-case letters that the fake generates."""
    letters = [hashlib.sha256(b"%d/%d" % (seed, i)).digest()[0] % 26 for i in range(n)]
    return [ord("a") + letter for letter in letters]


def expected_text(seed: int, n: int) -> str:
    return bytes(expected_ids(seed, n)).decode()


def expected_embedding(ids: list[int]) -> np.ndarray:
    """The vector float32 [HIDDEN] of a prompt before it is cut or normalized."""
    return np.array([len(ids), ids[-1], sum(ids), -1, *([0.5] * (HIDDEN - 4))], np.float32)


def _entry(token: int, offset: int, k: int, listed: list[int] | None = None) -> LogprobEntry:
    top = [(token_text(t), t, -3.0, list(token_text(t).encode())) for t in listed or ()]
    top += [
        (token_text(t), t, -0.5 - rank, list(token_text(t).encode()))
        for rank, t in enumerate([token, ord("Y"), ord("Z")][:k])
    ]
    text = token_text(token)
    return LogprobEntry(text, token, -0.5, list(text.encode()), top, offset)


def with_list(sequence: TokenSequence) -> TokenSequence:
    """With its prompt as a list, which tests can compare."""
    return msgspec.structs.replace(sequence, prompt_ids=list(map(int, sequence.prompt_ids)))


class FakeEngineClient(EngineClient):
    """`started`, `finished` and `aborted` hold requests; the other attributes set its behaviour."""

    def __init__(
        self,
        max_model_len: int = 256,
        vocab_size: int = 300,
        tool_format: str = "",
        reasons: bool = False,
        reasoning_format: str = "qwen3",
    ) -> None:
        super().__init__()
        self._info = model_info(
            "fake",
            max_model_len,
            vocab_size,
            created=1_700_000_000,
            tool_format=tool_format,
            reasoning_format=reasoning_format if reasons else "",
            hidden_size=HIDDEN,
        )
        self.started: list[TokenSequence] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.step_s = 0.0
        self.num_cached = 0
        self.num_computed = 0
        """Tokens that weren't known."""
        self.error_at: tuple[int, Exception] | None = None
        """Raise the exception before this output token."""
        self.error_delta = False
        """Report the error by a delta instead."""
        self.hang_at: int | None = None
        """Wait for ever before this output token."""
        self.swallow_first = 0
        """Number of first tokens that bring no text (it comes with the next token)."""
        self.script: str | None = None
        """The output in ASCII, which ends with it; None: a function of the seed."""
        self.is_healthy = True
        self.refusals: list[str] = []
        """Why caches aren't flushed."""
        self.num_flushes = 0
        self.stats_delay_s = 0.0
        self.num_traced_steps = 10
        self.chat_calls: list[dict[str, Any]] = []
        self.checked: list[ConstraintSpec] = []
        """Constraints that were checked."""
        self.constraint_error: RequestError | None = None
        """Refuses every constraint."""

    @property
    def open(self) -> int:
        return len(self.started) - len(self.finished) - len(self.aborted)

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        head = [BOS] if add_special_tokens else []
        return [head + list(text.encode()) for text in texts]

    async def decode(self, token_ids: list[int]) -> str:
        return "".join(token_text(token) for token in token_ids)

    async def decode_each(self, token_ids: list[int]) -> list[str]:
        return [token_text(token) for token in token_ids]

    async def render_chat(self, chat: Conversation) -> list[int]:
        self.chat_calls.append(msgspec.structs.asdict(chat))
        check_template_kwargs(chat.template_kwargs or {})
        messages = [normalize_message(message) for message in chat.messages]
        if messages[-1]["role"] == "assistant" and not chat.continue_final_message:
            raise RequestError("the template wants a user's message last", "messages")
        return list("".join(f"[{m['role']}]{m['content']}" for m in messages).encode())

    async def check_constraint(self, spec: ConstraintSpec) -> None:
        self.checked.append(spec)
        if self.constraint_error is not None:
            raise self.constraint_error
        verify_constraint(spec, self._info.resolved.model.vocab_size)

    async def generate(
        self,
        request: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        async with aclosing(self._deltas(request, known_ids)) as deltas:
            async for delta in deltas:
                read([delta])

    async def _deltas(
        self, request: TokenSequence, known_ids: Sequence[int] = ()
    ) -> AsyncGenerator[TextDelta, None]:
        params = request.params
        request = with_list(request)
        self.started.append(request)
        done = False
        try:
            if request.pooling is not None:
                yield await self._embed(request)
                done = True
                return
            assert params.seed is not None and params.max_tokens is not None
            if self.script is None:
                ids = expected_ids(params.seed, params.max_tokens)
            else:
                ids = list(self.script.encode())[: params.max_tokens]
            if not ids:
                done = True
                yield self._delta(request, 1, "", [EOS], "stop")
            assert list(known_ids) == ids[: len(known_ids)]
            self.num_computed += len(ids) - max(len(known_ids) - 1, 0)
            text, held, held_ids, held_entries = "", "", [], []
            for i, token in enumerate(ids):
                # Sleeping for 0 s lets the other tasks run, as a real engine's wait would.
                await asyncio.sleep(self.step_s if i >= len(known_ids) else 0)
                if i == self.hang_at:
                    await asyncio.Event().wait()
                if self.error_at is not None and i == self.error_at[0]:
                    done = True
                    if not self.error_delta:
                        raise self.error_at[1]
                    yield self._delta(request, i, "", [], "error", error=str(self.error_at[1]))
                    return
                held_ids.append(token)
                if params.logprobs is not None:
                    listed = params.logprob_token_ids
                    held_entries.append(_entry(token, len(text), params.logprobs, listed))
                text += chr(token)
                held += chr(token)
                stop = next((s for s in params.stop if s in text), None)
                last = i + 1 == len(ids)
                if i < self.swallow_first and not last and stop is None:
                    continue
                delta = self._delta(request, i + 1, held, held_ids)
                delta.logprobs = held_entries or None
                if stop is not None:
                    delta.text = held[: len(held) - len(stop)] if len(stop) <= len(held) else ""
                    delta.finish_reason, delta.stop_reason = "stop", stop
                elif last:
                    delta.finish_reason = "length" if len(ids) == params.max_tokens else "stop"
                if params.prompt_logprobs is not None and delta.num_output == len(held_ids):
                    delta.prompt_logprobs = self._prompt_entries(request)
                held, held_ids, held_entries = "", [], []
                done = delta.finish_reason is not None
                yield delta
                if done:
                    return
        finally:
            (self.finished if done else self.aborted).append(request.request_id)

    async def _embed(self, request: TokenSequence) -> TextDelta:
        await asyncio.sleep(self.step_s)
        if self.hang_at is not None:
            await asyncio.Event().wait()
        if self.error_at is not None:
            if not self.error_delta:
                raise self.error_at[1]
            return self._delta(request, 0, "", [], "error", error=str(self.error_at[1]))
        delta = self._delta(request, 0, "", [], "stop")
        delta.embedding = expected_embedding(request.prompt_ids).tobytes()
        return delta

    def _delta(
        self,
        request: TokenSequence,
        num_output: int,
        text: str,
        ids: list[int],
        finish: str | None = None,
        error: str = "",
    ) -> TextDelta:
        num_prompt = len(request.prompt_ids)
        cached = min(self.num_cached, num_prompt)
        delta = TextDelta(1, text, ids, num_output, finish, None, num_prompt, cached)
        delta.error, delta.error_status = error, 500 if error else 0
        return delta

    @staticmethod
    def _prompt_entries(request: TokenSequence) -> list[LogprobEntry | None]:
        assert request.params.prompt_logprobs is not None
        entries: list[LogprobEntry | None] = []
        offset = 0
        for token in request.prompt_ids:
            entry = _entry(token, offset, request.params.prompt_logprobs)
            entries.append(entry if entries else None)
            offset += len(SPECIAL.get(token, chr(token)))
        return entries

    async def abort(self, request_id: str | None, owner: str | None) -> None:
        self.abort_here(request_id, owner)

    async def flush_cache(self) -> list[str]:
        self.num_flushes += 1
        return self.refusals

    async def check_generate(self, timeout_s: float) -> EngineHealth:
        return await self.health()

    async def server_info(self) -> dict[str, Any]:
        replica = {"replica": "r0", "tp_size": 1, "device": "cpu", "num_kv_tokens": 4096}
        return {"num_replicas": 1, "log_level": "INFO", "replicas": [replica]}

    async def health(self) -> EngineHealth:
        return EngineHealth(self.is_healthy, "" if self.is_healthy else "a worker died")

    async def trace(self, last: int) -> dict[str, list[RoleTrace]]:
        steps: TraceRing[StepSpan] = TraceRing()
        for i in range(self.num_traced_steps):
            at = i / 100
            steps.add(StepSpan(i, 0, "decode", 3, 3, at, at + 0.001, at + 0.009, at + 0.0091))
        return {"fake": [scheduler_trace(steps, last)]}

    async def engine_status(self) -> EngineStatus:
        roles: list[RoleStatus] = [{"role": "worker 0", "pid": 7, "wrong": ""}]
        replicas: list[ReplicaStatus] = [
            {
                "place": 1,
                "replica": "abc",
                "state": "serving",
                "detail": "",
                "node": "10.0.0.1",
                "roles": roles,
                "stats": {"num_running": 3},
            }
        ]
        return EngineStatus(1, replicas, "")

    async def stats(self) -> list[dict[str, float]]:
        await asyncio.sleep(self.stats_delay_s)
        return [
            {"replica": 0, "num_running": 3, "kv_used_tokens": 100, "retractions_total": 5},
            {"replica": 1, "num_running": 4, "kv_used_tokens": 200, "retractions_total": 6},
        ]
