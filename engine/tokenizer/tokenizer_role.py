"""`TokenizerRole`: the tokenizer as a server of messages, for one ingress.

ingress    --EncodeRequest, ChatRequest, Register, Unregister-->  here  --replies, TextOutputs
scheduler  --StepOutputs, one per step-->                         here
here       --AbortRequest (a stop string matched)-->              scheduler
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, defaultdict
from typing import Any

from engine.errors import MantaError, RequestError
from engine.protocol import tokenizer_messages as tm
from engine.protocol.messages import AbortRequest, Shutdown, StepOutputs
from engine.protocol.outboxes import Outboxes
from engine.protocol.tokenizer_messages import TextDelta
from engine.protocol.transport import Inbox
from engine.tokenizer.detokenizer_manager import DetokenizerManager
from engine.tokenizer.encoding_thread import EncodingThread, is_long
from engine.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TokenizerRole:
    """Encodes, detokenizes and finds stop strings; never touches Ray."""

    def __init__(self, model_path: str, host: str) -> None:
        self.tokenizer = Tokenizer.from_pretrained(model_path)
        self.manager = DetokenizerManager(self.tokenizer)
        self.inbox = Inbox(host)
        self._outboxes = Outboxes()
        self._long_texts = EncodingThread(self._encode, self.inbox.address)
        self._ingress: dict[int, str] = {}
        """rid -> address of the ingress that reads it."""
        self._scheduler: dict[int, str] = {}
        """rid -> scheduler that runs it, once it started."""
        self._running: Counter[str] = Counter()
        """Number of running requests by scheduler."""

    @property
    def address(self) -> str:
        """The address to send messages to, which is also the `reply_to` of requests read here."""
        return self.inbox.address

    def run(self) -> None:
        """Answer messages until `Shutdown` comes."""
        # A vocabulary is a large heap. Collecting it later would delay all streams.
        gc.collect()
        gc.freeze()
        while True:
            message = self.inbox.recv(None)
            if isinstance(message, Shutdown):
                break
            self.handle(message)
        self._long_texts.close()
        self._outboxes.close()
        self.inbox.close()

    def handle(self, message: Any) -> None:
        """Answer one message. A bad request is answered with its error."""
        match message:
            case StepOutputs():
                self._on_step(message)
            case tm.Register():
                self._register(message)
            case tm.Unregister():
                self.manager.abort(message.rid)
                self._forget(message.rid)
            case tm.EncodeRequest() | tm.ChatRequest():
                if is_long(message):
                    self._long_texts.put(message)
                else:
                    self._send(message.reply_to, self._encode(message))
            case tm.DecodeRequest():
                self._decode(message)
            case _:
                raise TypeError(f"a tokenizer can't take a {type(message).__name__}")

    def _register(self, m: tm.Register) -> None:
        try:
            deltas = self.manager.add(m)
        except ValueError as error:
            self._send(m.reply_to, tm.Registered(m.call, str(error)))
            return
        self._ingress[m.rid] = m.reply_to
        self._send(m.reply_to, tm.Registered(m.call, deltas=deltas))

    def _encode(self, m: tm.EncodeRequest | tm.ChatRequest) -> tm.EncodeReply:
        """The answer. Two threads call it: the tokenizer doesn't change while it encodes."""
        try:
            if isinstance(m, tm.EncodeRequest):
                ids = self.tokenizer.encode_batch(m.texts, m.add_special_tokens)
            else:
                ids = [self.tokenizer.encode_chat(m.chat)]
            return tm.EncodeReply(m.call, ids)
        except MantaError as error:
            param = error.param if isinstance(error, RequestError) else None
            return tm.EncodeReply(m.call, [], str(error), param)

    def _decode(self, m: tm.DecodeRequest) -> None:
        if m.each:
            texts = [self.tokenizer.token_text(token) for token in m.token_ids]
            self._send(m.reply_to, tm.DecodeReply(m.call, "", texts))
            return
        text = self.tokenizer.decode(m.token_ids, skip_special_tokens=False)
        self._send(m.reply_to, tm.DecodeReply(m.call, text))

    def _on_step(self, out: StepOutputs) -> None:
        if out.scheduler:
            for rid, *_ in out.started:
                if rid in self._ingress:
                    self._scheduler[rid] = out.scheduler
                    self._running[out.scheduler] += 1
        deltas, stopped = self.manager.process(out)
        for rid in stopped:
            scheduler = self._scheduler.get(rid)
            if scheduler is not None:
                self._send(scheduler, AbortRequest(rid=rid, reply_to=self.address))
        by_ingress: defaultdict[str, list[TextDelta]] = defaultdict(list)
        for delta in deltas:
            by_ingress[self._ingress[delta.rid]].append(delta)
        for ingress, some in by_ingress.items():
            self._send(ingress, tm.TextOutputs(some))
        for rid in (*stopped, *(end.rid for end in out.finished)):
            self._forget(rid)

    def _forget(self, rid: int) -> None:
        self._ingress.pop(rid, None)
        scheduler = self._scheduler.pop(rid, None)
        if scheduler is not None:
            self._running[scheduler] -= 1
            if not self._running[scheduler]:
                # The scheduler may be gone: a connection would try to reach it for ever.
                del self._running[scheduler]
                self._outboxes.drop(scheduler)

    def _send(self, address: str, message: Any) -> None:
        if not self._outboxes.send(address, message):
            logger.warning("a peer stopped reading; closing its connection")
            self._outboxes.drop(address)
