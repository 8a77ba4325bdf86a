"""Messages between stages that exchange rows survive their encoding."""

import msgspec
import pytest

from omni_server.protocol.rows import (
    InlineBlock,
    RowsFeed,
    RowsPayload,
    Segment,
    TextSegment,
    decode_feeds,
)


def payload(*segments: Segment) -> RowsPayload:
    return RowsPayload(9, 0, 4, "float32", InlineBlock(b"rows"), segments)


def test_the_segments_of_a_feed_are_in_the_order_of_their_positions() -> None:
    first, behind = Segment(2, 2, 0), Segment(7, 1, 8)
    text = TextSegment(0, (5, 6)), TextSegment(4, (7, 8, 9))
    assert RowsFeed(payload(first, behind), text=text).segments == [text[0], first, text[1], behind]
    assert [segment.num_rows for segment in text] == [2, 3]


def test_an_id_that_is_no_number_is_refused() -> None:
    broken = msgspec.msgpack.encode([("a", {"text": [[0, ["x"]]]})])
    with pytest.raises(msgspec.ValidationError, match="int"):
        decode_feeds(broken)
