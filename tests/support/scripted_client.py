"""`ScriptedClient`: a model that writes what it is told, behind a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from engine.protocol.messages import FinishedReq, StepOutputs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import Conversation, TextDelta
from engine.tokenizer import DetokenizerManager, Tokenizer
from tests.support.fake_client import FakeEngineClient, with_list
from tests.support.registering import register


class ScriptedClient(FakeEngineClient):
    """Every output is the text `script`, token by token, as far as its request lets it come. At
    its end is eos."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: str,
        reasons: bool = True,
        reasoning_format: str = "qwen3",
    ) -> None:
        super().__init__(16384, tokenizer.vocab_size, tool_format, reasons, reasoning_format)
        self.script = ""
        self.tokenizer = tokenizer
        self._manager = DetokenizerManager(tokenizer)
        self._num_requests = 0

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def render_chat(self, chat: Conversation) -> list[int]:
        # As between roles: what messages can't hold is an error here, too.
        chat = msgspec.msgpack.decode(msgspec.msgpack.encode(chat), type=Conversation)
        return self.tokenizer.encode_chat(chat)

    async def generate(
        self,
        request: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        request = with_list(request)
        self.started.append(request)
        self._num_requests += 1
        rid, params = self._num_requests, request.params
        assert self.tokenizer.eos_token_id is not None and params.max_tokens is not None
        ids = self.tokenizer.encode(self.script or "", add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id][: params.max_tokens]
        self._manager.add(register(rid, params, request.prompt_ids, return_token_ids=True))
        ends = _scheduler_ends(params, self.tokenizer.eos_token_id)
        for number, token in enumerate(ids, 1):
            finished = []
            if token in ends or number == len(ids):
                is_stop = token in ends
                end = FinishedReq(
                    rid,
                    "stop" if is_stop else "length",
                    len(request.prompt_ids),
                    number,
                    0,
                    token if is_stop else None,
                )
                finished.append(end)
            deltas, stopped = self._manager.process(StepOutputs(0, [rid], [token], finished, []))
            read(deltas)
            if finished or stopped:
                break
        self.finished.append(request.request_id)


def _scheduler_ends(params: SamplingParams, eos: int) -> set[int]:
    """What a scheduler ends an output at (`engine/scheduler/admission.py`)."""
    return {eos, *(params.stop_token_ids if params.thinking is None else ())}
