import pytest

from benchmarks.serving.stream import EventParser

STREAM = (
    b": a comment\n\n"
    b'data: {"a": 1}\n\n'
    b"event: message\r\nid: 7\r\ndata:without a space\r\n\r\n"
    b"data: two\ndata: lines\n\n"
    b"\n\n"
    b"data:  one space belongs to it\n\n"
    b"data: \xf0\x9f\x8e\xa7 \xe2\x80\xa8 in UTF-8\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    b'{"a": 1}',
    b"without a space",
    b"two\nlines",
    b" one space belongs to it",
    b"\xf0\x9f\x8e\xa7 \xe2\x80\xa8 in UTF-8",
    b"[DONE]",
]


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_may_be_cut_anywhere(cut: int) -> None:
    parser = EventParser()

    assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == EVENTS


def test_a_stream_may_come_byte_by_byte() -> None:
    parser = EventParser()

    assert [event for byte in STREAM for event in parser.feed(bytes([byte]))] == EVENTS


def test_an_event_is_there_with_the_last_byte_of_its_blank_line_and_not_before() -> None:
    parser = EventParser()

    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [b"x"]


def test_an_event_without_its_blank_line_is_not_delivered() -> None:
    assert EventParser().feed(b"data: cut off\n") == []
