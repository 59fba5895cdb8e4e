"""`SchedulerThread`: a scheduler's process as a thread, and its worker as another."""

from __future__ import annotations

import threading
from typing import Any

from engine.executor.message_executor import ReadyWorkers
from engine.loop.scheduler_role import SchedulerRole
from engine.protocol.messages import ExpertTokens, Shutdown
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch
from engine.protocol.transport import Inbox, Outbox
from tests.support.scheduler_configs import scheduler_config

HOST = "127.0.0.1"
TOKEN = 9
"""What the worker samples, always."""


class SchedulerThread:
    """A running `SchedulerRole`. Its worker answers while `works` is set."""

    def __init__(self, **config: Any) -> None:
        self.inbox, results, self._worker = Inbox(HOST), Inbox(HOST), Inbox(HOST)
        sizes = {"num_kv_tokens": 256, "max_model_len": 64, "vocab_size": 16, "page_size": 4}
        workers = ReadyWorkers([self._worker.address], 256)
        self.role = SchedulerRole(
            scheduler_config(**{**sizes, **config}), self.inbox, workers, results
        )
        self.works = threading.Event()
        self.works.set()
        self.reports: list[ExpertTokens] = []
        """What the worker tells behind its next result."""
        self._results = results.address
        self._outbox = Outbox(self.inbox.address)
        self._threads = [
            threading.Thread(target=self.role.run, args=(lambda: "",)),
            threading.Thread(target=self._work),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        self._outbox.send(message)

    def stop(self) -> None:
        self.works.set()
        self.send(Shutdown())
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def _work(self) -> None:
        results = Outbox(self._results)
        while not isinstance(message := self._worker.recv(None), Shutdown):
            assert isinstance(message, ModelWorkerBatch)
            self.works.wait(20)
            tokens = [TOKEN] * len(message.sampled_lines)
            results.send(GenerationBatchResult(message.step, tokens))
            while self.reports:
                results.send(self.reports.pop(0))
        results.close()
        self._worker.close()
