"""When a stage tells how many tokens its experts got."""

from __future__ import annotations

from engine.protocol.messages import ExpertTokens
from engine.worker.base import LaunchedForward, ModelWorker
from engine.worker.expert_report import INTERVAL_S, ExpertReport


class Counting(ModelWorker):
    """Each look at its counts finds one token more."""

    looks = 0

    def forward(self, batch: object) -> LaunchedForward | None:
        raise NotImplementedError

    def expert_tokens(self) -> dict[int, list[int]]:
        self.looks += 1
        return {3: [self.looks]}


def test_reports_are_a_second_apart_and_the_last_step_is_reported() -> None:
    now, sent = 100.0, list[ExpertTokens]()
    report = ExpertReport(Counting(), sent.append, lambda: now)
    assert report.send_due() is None and sent == []
    report.stepped()
    assert report.send_due() is None and sent == [ExpertTokens({3: [1]})]
    report.stepped()
    now += INTERVAL_S / 4
    assert report.send_due() == INTERVAL_S * 3 / 4 and len(sent) == 1
    report.stepped()
    now += INTERVAL_S
    assert report.send_due() is None and sent[1:] == [ExpertTokens({3: [2]})]
    now += 10 * INTERVAL_S
    assert report.send_due() is None and len(sent) == 2, "no step ran since"
