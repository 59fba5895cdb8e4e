"""`Outboxes`: one connection per address, kept while its receiver may go on."""

from __future__ import annotations

import pytest

from engine.protocol.messages import AbortRequest
from engine.protocol.outboxes import Outboxes
from engine.protocol.transport import Inbox


def test_messages_to_each_address_keep_their_order_on_one_connection() -> None:
    inboxes = [Inbox(), Inbox()]
    outboxes = Outboxes()
    for rid in range(5):
        for inbox in inboxes:
            assert outboxes.send(inbox.address, AbortRequest(rid=rid))
    for inbox in inboxes:
        assert [inbox.recv(5.0) for _ in range(5)] == [AbortRequest(rid=i) for i in range(5)]
        assert len(inbox._order._expected) == 1
    outboxes.close()
    for inbox in inboxes:
        inbox.close()


def test_a_dropped_address_is_connected_again_with_the_next_message() -> None:
    inbox, outboxes = Inbox(), Outboxes()
    outboxes.drop(inbox.address)
    for rid in (1, 2):
        assert outboxes.send(inbox.address, AbortRequest(rid=rid))
        outboxes.drop(inbox.address)
        assert inbox.recv(5.0) == AbortRequest(rid=rid)
    inbox.close()


def test_a_receiver_that_never_reads_is_told_by_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.protocol.transport.SEND_LIMIT", 10)
    inbox, outboxes = Inbox(), Outboxes()
    address = inbox.address
    inbox.close()
    sent = [outboxes.send(address, AbortRequest(rid=i)) for i in range(100)]
    assert sent[0] and not sent[-1]
    assert sent == sorted(sent, reverse=True), "the connection stays, and stays full"
    outboxes.drop(address)
    assert outboxes.send(address, AbortRequest(rid=0))
    outboxes.drop(address)
