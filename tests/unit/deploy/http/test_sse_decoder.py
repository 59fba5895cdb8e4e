"""The one reader of server-sent events."""

from __future__ import annotations

import pytest

from deploy.http.sse_decoder import SSEDecoder


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_do_not_depend_on_where_the_stream_is_cut(line_end: bytes) -> None:
    text = 'data: {"a": "é"}\n\n: comment\n\ndata:two\ndata: lines\n\nevent: x\ndata: [DONE]\n\n'
    stream = text.encode().replace(b"\n", line_end)
    expected = ['{"a": "é"}'.encode(), b"two\nlines", b"[DONE]"]
    for cut in range(len(stream) + 1):
        decoder = SSEDecoder()
        assert decoder.feed(stream[:cut]) + decoder.feed(stream[cut:]) == expected
    decoder = SSEDecoder()
    one_by_one = [decoder.feed(bytes([byte])) for byte in stream]
    assert [event for events in one_by_one for event in events] == expected


def test_an_unfinished_event_is_held_back() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: half\n") == []
    assert decoder.feed(b"\n") == [b"half"]


def test_events_of_one_read_come_in_order() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: 1\n\ndata: 2\n\ndata: 3\n") == [b"1", b"2"]
    assert decoder.feed(b"\n\n\n") == [b"3"]


def test_only_one_blank_is_cut_off_and_no_line_end_but_lf_counts() -> None:
    """Unicode's line ends and a lone CR belong to the data."""
    data = "  a\u2028b\x85c\rd ".encode()
    assert SSEDecoder().feed(b"data:" + data + b"\n\n") == [data[1:]]
