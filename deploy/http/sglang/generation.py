"""Replies and streams of `POST /generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.http.body import encode_json
from deploy.http.engine_client import EngineClient
from deploy.http.generation.generation import Generation, Output
from deploy.http.generation.plan import Plan
from deploy.http.metrics import RequestTracker
from deploy.http.sglang.request import GenerateFields, LogprobFields
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta, TopLogprob

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

Logprob = tuple[float | None, int, str | None]
"""Log-probability, token id and text."""


class GenerateGeneration(Generation[GenerateFields]):
    """One object for each sequence. Those of a stream hold all of the output so far."""

    def __init__(
        self,
        client: EngineClient,
        fields: GenerateFields,
        plan: Plan,
        tracker: RequestTracker,
        first_tokens: Sequence[str],
    ) -> None:
        """`first_tokens`: the text of each prompt's first token, where it is wanted."""
        super().__init__(client, fields, plan, tracker)
        self._rids = fields.rids(plan.request.id)
        self._first_tokens = first_tokens
        for index, output in enumerate(self._outputs):
            output.is_dropped = fields.each_sampling[index // plan.n].max_new_tokens == 0

    def _reply(self) -> bytes:
        items = [
            self._item(index, output.finish_reason, output.num_output)
            for index, output in enumerate(self._outputs)
        ]
        return encode_json(items if self._is_list else items[0])

    def _opening(self) -> bytes:
        return b""

    def _events(self, index: int, delta: TextDelta) -> bytes:
        return self._all_events(index, [delta])

    def _all_events(self, index: int, deltas: list[TextDelta]) -> bytes:
        """One event for all that came, because each holds what those before it have."""
        if not deltas:
            return b""
        output = self._outputs[index]
        for delta in deltas:
            output.texts.append(delta.text)
            output.token_ids += delta.token_ids
            output.logprobs += delta.logprobs or []
        item = self._item(index, deltas[-1].finish_reason, deltas[-1].num_output)
        if self._is_list:
            item["index"] = index
        return b"data: " + encode_json(item) + b"\n\n"

    def _numbered(self, index: int, events: bytes, num_deltas: int = 0) -> bytes:
        if self.numbers is None or not num_deltas:
            return super()._numbered(index, events)
        return self.numbers.of_last(index, events, num_deltas)

    def _ending(self) -> bytes:
        return b"data: [DONE]\n\n"

    @property
    def _is_list(self) -> bool:
        return self._request.is_batch or self._plan.n > 1

    def _item(self, index: int, reason: str | None, num_output: int) -> dict[str, Any]:
        """What a sequence has given so far: `num_output` tokens. `reason`: why it has ended."""
        output, prompt = self._outputs[index], index // self._plan.n
        meta: dict[str, Any] = {
            "id": self._rids[prompt],
            "finish_reason": None if reason is None else _end(reason, output, num_output),
            "prompt_tokens": len(self._plan.sequences[index].prompt_ids),
            "weight_version": "default",
            **self._logprobs(index, self._request.each_logprobs[prompt]),
            "completion_tokens": num_output,
            "cached_tokens": output.num_cached,
        }
        if reason is not None:
            meta["e2e_latency"] = self._tracker.elapsed_s
        return {
            "text": "".join(output.texts),
            "output_ids": output.token_ids,
            "meta_info": meta,
        }

    def _logprobs(self, index: int, fields: LogprobFields) -> dict[str, Any]:
        """Those of the prompt from `fields.start` on, and of the output."""
        if not fields.wanted:
            return {}
        output = self._outputs[index]
        prompt: Sequence[LogprobEntry | None] = []
        if fields.of_prompt:
            prompt = (output.prompt_logprobs or [])[fields.start :]
        found: dict[str, Any] = {
            "input_token_logprobs": [
                self._first_token(index) if entry is None else self._own(entry) for entry in prompt
            ],
            "output_token_logprobs": [self._own(entry) for entry in output.logprobs],
        }
        listed = len(fields.listed)
        if fields.num_top:
            found["input_top_logprobs"] = [entry and self._others(entry.top) for entry in prompt]
            found["output_top_logprobs"] = [self._others(e.top[listed:]) for e in output.logprobs]
        if listed:
            found["input_token_ids_logprobs"] = []
            found["output_token_ids_logprobs"] = [
                self._others(e.top[:listed]) for e in output.logprobs
            ]
        return found

    def _own(self, entry: LogprobEntry) -> Logprob:
        return self._logprob(entry.logprob, entry.token_id, entry.token)

    def _others(self, entries: Sequence[TopLogprob]) -> list[Logprob]:
        return [self._logprob(logprob, token, text) for text, token, logprob, _ in entries]

    def _logprob(self, logprob: float, token_id: int, text: str) -> Logprob:
        with_text = self._request.return_text_in_logprobs
        return max(logprob, MIN_LOGPROB), token_id, text if with_text else None

    def _first_token(self, index: int) -> Logprob:
        """That of the prompt's first token, which has no log-probability."""
        text = self._first_tokens[index // self._plan.n] if self._first_tokens else None
        return None, int(self._plan.sequences[index].prompt_ids[0]), text


def _end(reason: str, output: Output, num_output: int) -> dict[str, Any]:
    """`finish_reason` of an output whose sequence ended for `reason`."""
    match reason:
        case "length":
            return {"type": "length", "length": num_output}
        case "stop":
            matched = output.stop_reason
            if matched is None and output.token_ids:  # what completed a grammar
                matched = output.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case _:
            return {
                "type": "abort",
                "message": "The request was aborted.",
                "status_code": None,
                "err_type": None,
            }
