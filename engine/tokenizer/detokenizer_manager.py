"""`DetokenizerManager`: from the scheduler's token ids to text deltas, for a reader's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol.messages import FinishedReq, StepOutputs
from engine.protocol.step import TokenLogprobs
from engine.protocol.tokenizer_messages import LogprobEntry, Register, TextDelta, TopLogprob
from engine.tokenizer.detokenizer import IncrementalDetokenizer
from engine.tokenizer.output_stops import OutputStops
from engine.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Request:
    """One request."""

    delta: TextDelta
    """The next one. What waits for its text is in it; text and number of tokens are not."""
    detokenizer: IncrementalDetokenizer
    stops: OutputStops | None
    include_stop: bool
    skip_special_tokens: bool
    send_every_token: bool
    prompt_ids: Sequence[int] | None
    """Kept only until the prompt's logprobs have come."""
    num_output: int = 0
    text_len: int = 0
    """Characters detokenized so far, held back or not."""

    @property
    def matched(self) -> str | int | None:
        """The stop string or id that ended the output here."""
        return None if self.stops is None else self.stops.matched

    def add_token(self, token_id: int, tokenizer: Tokenizer) -> str:
        """Count one token, return the text that may go out."""
        self.num_output += 1
        stops = self.stops
        if stops is None:
            return self._check(self.detokenizer.add(token_id))
        if stops.add_token(token_id, tokenizer.token_text) and not self.include_stop:
            return ""  # the token that stopped it is output, but not text
        text = self._check(self.detokenizer.add(token_id))
        if self.skip_special_tokens and token_id in tokenizer.special_ids:
            text += stops.hide(tokenizer.token_text(token_id), self.num_output)
        return text

    def add_last(self) -> str:
        """The text that was held back; called when no more tokens come."""
        text = self._check(self.detokenizer.flush())
        return text if self.stops is None else text + self.stops.flush()

    def _check(self, text: str) -> str:
        self.text_len += len(text)
        if self.stops is None or not text:
            return text
        return self.stops.feed(text, self.num_output)


class DetokenizerManager:
    """Holds the text state of every running request of one reader.

    A request leaves when it finishes, when its stop string is found, or by `abort`. Tokens that the
    scheduler still sends of it are then ignored.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, _Request] = {}
        # Text and bytes of the tokens that logprobs named so far; entries share the lists.
        self._pieces: dict[int, tuple[str, list[int]]] = {}

    def __len__(self) -> int:
        """Number of requests under way."""
        return len(self._requests)

    def add(self, message: Register) -> list[TextDelta]:
        """Begin a request. Returns the deltas of `known_ids`.

        If it has `output_ids` (resume), the state is as if they had been processed here, and their
        text isn't sent again; text that was held back is still held back.
        Raises `ValueError` if a stop string is in one of them: that request had finished.
        """
        rid, params = message.rid, message.params
        request = _Request(
            delta=_empty_delta(rid, message.num_prompt),
            detokenizer=IncrementalDetokenizer.create(
                self._tokenizer,
                params.skip_special_tokens,
                message.prompt_ids,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            stops=OutputStops(params)
            if params.stop or (params.thinking is not None and params.stop_token_ids)
            else None,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            send_every_token=message.return_token_ids,
            prompt_ids=message.prompt_ids if params.prompt_logprobs is not None else None,
        )
        for token_id in message.output_ids:
            request.add_token(token_id, self._tokenizer)
        deltas: list[TextDelta] = []
        for token_id in message.known_ids:
            request.delta.token_ids.append(token_id)
            text = request.add_token(token_id, self._tokenizer)
            if text or request.send_every_token:
                deltas.append(_take(request, text))
        if request.matched is not None:
            raise ValueError(f"request {rid} was resumed behind its stop string")
        self._requests[rid] = request
        return deltas

    def abort(self, rid: int) -> None:
        """Forget a request (no delta is made). Nothing happens if it is unknown."""
        self._requests.pop(rid, None)

    def process(self, out: StepOutputs) -> tuple[list[TextDelta], list[int]]:
        """Deltas of one step, and the rids that a stop string, or behind a thought a stop id,
        ended here.

        The caller tells the scheduler of these rids (`AbortRequest`). Each token has a delta of its
        own, also where a step brought several, so that the deltas of an output are always the same.
        Only a token that brings no text to send has none; its id and logprobs come with the next.
        """
        deltas: list[TextDelta] = []
        stopped: list[int] = []
        requests = self._requests
        ends = {end.rid: end for end in out.finished}
        for rid, num_cached, queue_s in out.started:
            if (request := requests.get(rid)) is not None:
                request.delta.num_cached, request.delta.queue_s = num_cached, queue_s
                if out.prompt_logprobs and request.prompt_ids is not None:
                    self._add_prompt_logprobs(request, out.prompt_logprobs.get(rid))
        logprobs = out.logprobs
        index = -1
        for number, rid in enumerate(out.rids):
            request = requests.get(rid)
            index, last = index + 1, index + (1 if out.counts is None else out.counts[number])
            if request is None:
                index = last
                continue
            while True:
                token_id = out.token_ids[index]
                if logprobs and index in logprobs:
                    self._add_logprobs(request, token_id, logprobs[index])
                request.delta.token_ids.append(token_id)
                if index == last and ends and (end := ends.pop(rid, None)) is not None:
                    deltas.append(self._finish(request, end, token_id))
                    break
                text = request.add_token(token_id, self._tokenizer)
                if request.matched is not None:
                    deltas.append(self._stop(request, text))
                    stopped.append(rid)
                    break
                if text or request.send_every_token:
                    deltas.append(_take(request, text))
                if index == last:
                    break
                index += 1
            index = last
        for end in ends.values():
            if (request := requests.get(end.rid)) is not None:
                deltas.append(delta := self._finish(request, end, None))
                if out.embeddings is not None:
                    delta.embedding = out.embeddings.get(end.rid)
        return deltas, stopped

    def _finish(self, request: _Request, end: FinishedReq, token_id: int | None) -> TextDelta:
        """The last delta of a request that the scheduler ended, at `token_id` if one came."""
        text = ""
        if token_id is not None:
            if end.matched_token is None or request.include_stop:
                text = request.add_token(token_id, self._tokenizer)
            else:
                # The token that stopped it is output, but not text.
                request.num_output += 1
        text += request.add_last()
        request.delta.num_cached = max(request.delta.num_cached, end.num_cached)
        if request.matched is not None:
            delta = self._end(request, text, "stop", request.matched)
            delta.num_predicted = end.num_predicted
            return delta
        delta = self._end(request, text, end.reason, end.matched_token)
        delta.num_predicted = end.num_predicted
        delta.error, delta.error_status, delta.error_param = end.message, end.status, end.param
        return delta

    def _stop(self, request: _Request, text: str) -> TextDelta:
        """The last delta of a request that ends here."""
        text += request.add_last()
        return self._end(request, text, "stop", request.matched)

    def _end(
        self, request: _Request, text: str, reason: str, stop_reason: str | int | None
    ) -> TextDelta:
        del self._requests[request.delta.rid]
        delta = _take(request, text)
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        return delta

    def _add_logprobs(self, request: _Request, token_id: int, logprobs: TokenLogprobs) -> None:
        if request.delta.logprobs is None:
            request.delta.logprobs = []
        offset = request.text_len + request.detokenizer.held_before(token_id)
        request.delta.logprobs.append(self._entry(token_id, logprobs, offset))

    def _add_prompt_logprobs(
        self, request: _Request, logprobs: Sequence[TokenLogprobs | None] | None
    ) -> None:
        if logprobs is None or request.prompt_ids is None:
            return
        # An echo has the names of special tokens.
        detokenizer = IncrementalDetokenizer.create(self._tokenizer, False)
        offset = 0
        entries: list[LogprobEntry | None] = []
        for token_id, item in zip(request.prompt_ids, logprobs, strict=True):
            begin = offset + detokenizer.held_before(int(token_id))
            entry = None if item is None else self._entry(int(token_id), item, begin)
            entries.append(entry)
            offset += len(detokenizer.add(int(token_id)))
        request.delta.prompt_logprobs = entries
        request.prompt_ids = None

    def _entry(self, token_id: int, logprobs: TokenLogprobs, offset: int) -> LogprobEntry:
        text, data = self._piece(token_id)
        top: list[TopLogprob] = []
        for other, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            other_text, other_data = self._piece(other)
            top.append((other_text, other, logprob, other_data))
        return LogprobEntry(text, token_id, logprobs.logprob, data, top, offset, logprobs.rank)

    def _piece(self, token_id: int) -> tuple[str, list[int]]:
        piece = self._pieces.get(token_id)
        if piece is None:
            tokenizer = self._tokenizer
            piece = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
            self._pieces[token_id] = piece
        return piece


def _take(request: _Request, text: str) -> TextDelta:
    """The request's delta, with `text`. The next one begins."""
    delta = request.delta
    delta.text, delta.num_output = text, request.num_output
    request.delta = _empty_delta(delta.rid, delta.num_prompt, delta.num_cached)
    return delta


def _empty_delta(rid: int, num_prompt: int, num_cached: int = 0) -> TextDelta:
    return TextDelta(rid, "", [], 0, None, None, num_prompt, num_cached)
