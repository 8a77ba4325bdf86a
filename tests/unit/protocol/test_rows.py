"""Messages between stages that exchange rows survive their encoding."""

import msgspec
import pytest

from omni_server.protocol.rows import (
    InlineBlock,
    RowsFeed,
    RowsInput,
    RowsOutput,
    RowsPayload,
    Segment,
    SourceSpan,
    TextSegment,
    decode_feeds,
    decode_request,
    encode,
    encode_feeds,
)

SPANS = (SourceSpan(7, 0, 3, has_rows=False), SourceSpan(10, 3, 4, has_rows=True))


@pytest.mark.parametrize(
    "request_",
    [
        RowsOutput("Ada"),
        RowsOutput("Ada", num_reply=2, spans=SPANS),
        RowsOutput("Ada", spans=()),
        RowsInput(num_replaced=3),
    ],
)
def test_a_request_comes_back_as_it_was_sent(request_: RowsOutput | RowsInput) -> None:
    assert decode_request(encode(request_)) == request_


def payload(*segments: Segment) -> RowsPayload:
    return RowsPayload(9, 0, 4, "float32", InlineBlock(b"rows"), segments)


@pytest.mark.parametrize(
    "feed",
    [
        RowsFeed(text=(TextSegment(0, (5, 6)), TextSegment(4, (7,))), tail_ids=(1, 2)),
        RowsFeed(payload(Segment(2, 2, 0)), text=(TextSegment(4, (7,)),)),
        RowsFeed(text=(TextSegment(5, (8,)),), final_length=6),
    ],
)
def test_feeds_come_back_as_they_were_sent(feed: RowsFeed) -> None:
    assert decode_feeds(encode_feeds([("a", feed), ("b", RowsFeed())])) == (("a", feed), ("b", RowsFeed()))


def test_the_segments_of_a_feed_are_in_the_order_of_their_positions() -> None:
    first, behind = Segment(2, 2, 0), Segment(7, 1, 8)
    text = TextSegment(0, (5, 6)), TextSegment(4, (7, 8, 9))
    assert RowsFeed(payload(first, behind), text=text).segments == [text[0], first, text[1], behind]
    assert [segment.num_rows for segment in text] == [2, 3]


def test_an_id_that_is_no_number_is_refused() -> None:
    broken = msgspec.msgpack.encode([("a", {"text": [[0, ["x"]]]})])
    with pytest.raises(msgspec.ValidationError, match="int"):
        decode_feeds(broken)
