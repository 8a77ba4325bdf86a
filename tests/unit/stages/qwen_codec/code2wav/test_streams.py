"""Slots: who has one, who finds its state, and who loses it."""

from stages.qwen_codec.code2wav.streams import Place, StreamTable
from stages.qwen_codec.codec_window import CodecWindow


def window(stream: str, first: int, *, last: bool = False) -> CodecWindow:
    return CodecWindow(stream, first, last, b"")


def step(streams: StreamTable, *windows: CodecWindow) -> list[Place]:
    """A batch of windows of 10 frames that succeeds."""
    places = streams.enter(windows)
    begins = [w.first_frame if p.seen is None else p.seen.start for w, p in zip(windows, places, strict=True)]
    seen = [range(begin, w.first_frame + 10) for begin, w in zip(begins, windows, strict=True)]
    streams.leave(windows, places, seen)
    return places


def reads(places: list[Place]) -> list[bool]:
    return [place.seen is not None for place in places]


def test_a_new_stream_takes_the_slot_of_the_least_recently_used() -> None:
    streams = StreamTable(2)
    step(streams, window("a", 0))
    [b] = step(streams, window("b", 0))
    step(streams, window("a", 10))
    assert step(streams, window("c", 0)) == [Place(b.slot, None)]
    assert [streams.end_of(name) for name in "abc"] == [20, None, 10]


def test_no_window_of_a_batch_takes_the_slot_of_another() -> None:
    streams = StreamTable(2)
    step(streams, window("a", 0))
    step(streams, window("b", 0))
    assert reads(step(streams, window("c", 0), window("a", 10))) == [False, True]


def test_aborted_streams_take_no_slots_for_ever() -> None:
    streams = StreamTable(2)
    for number in range(10):
        step(streams, window(str(number), 0))
    assert [streams.end_of(str(number)) for number in range(10)] == [*[None] * 8, 10, 10]
    step(streams, window("9", 10, last=True))
    assert len(streams.free_slots) == 1


def test_after_a_failure_the_streams_are_unknown_and_their_slots_free() -> None:
    streams = StreamTable(2)
    step(streams, window("a", 0))
    streams.abandon(streams.enter([window("a", 10), window("b", 0)]))
    assert [streams.end_of(name) for name in "ab"] == [None, None]
    assert len(streams.free_slots) == 2
