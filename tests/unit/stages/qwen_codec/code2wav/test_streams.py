"""Slots: who has one, who finds its state, and who loses it."""

from stages.qwen_codec.code2wav.streams import PastState, Place, StreamTable
from stages.qwen_codec.codec_window import CodecWindow


def window(stream: str, first: int, *, last: bool = False) -> CodecWindow:
    return CodecWindow(stream, first, last, b"")


def cloned(stream: str, voice: str, *, last: bool = False) -> CodecWindow:
    """The first window of a stream, which begins after the frames of a voice."""
    return CodecWindow(stream, 1, last, voice.encode(), is_first=True)


def step(streams: StreamTable, *windows: CodecWindow) -> list[Place]:
    """A batch of windows of 10 frames that succeeds."""
    places = streams.enter(windows)
    begins = [w.first_frame if p.seen is None else p.seen.start for w, p in zip(windows, places, strict=True)]
    seen = [range(begin, w.first_frame + 10) for begin, w in zip(begins, windows, strict=True)]
    streams.leave(windows, places, seen)
    slots = [p.slot for p in places] + list({p.past.slot for p in places if p.past is not None})
    assert len(set(slots)) == len(slots)
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


def knows(streams: StreamTable, voice: str) -> bool:
    """Whether the state after the frames of this voice is kept. Tried with a stream that ends at once."""
    [place] = streams.enter([cloned("asks", voice)])
    streams.leave([cloned("asks", voice, last=True)], [place], [range(11)])
    return place.past is not None and place.past.is_computed


def test_streams_that_begin_with_the_same_past_share_its_slot() -> None:
    streams = StreamTable(4)
    [a] = step(streams, cloned("a", "Ada"))
    assert a.past == PastState(a.past.slot if a.past else -1, is_computed=False)
    b, c = step(streams, cloned("b", "Ada"), cloned("c", "Ada"))
    assert a.past is not None
    assert b.past == c.past == PastState(a.past.slot, is_computed=True)
    assert not streams.free_slots


def test_the_same_codes_at_another_position_are_another_past() -> None:
    streams = StreamTable(6)
    step(streams, cloned("a", "Ada"))
    [b] = step(streams, CodecWindow("b", 2, False, b"Ada", is_first=True))
    assert b.past is not None
    assert not b.past.is_computed


def test_only_the_past_of_a_first_window_is_kept() -> None:
    """That of a later one, whose state was lost, is like no other stream's."""
    streams = StreamTable(4)
    [a, b] = step(streams, CodecWindow("a", 1, False, b"Ada"), CodecWindow("b", 0, False, b"", is_first=True))
    assert a.past is b.past is None
    assert len(streams.free_slots) == 2


def test_new_streams_take_free_slots_then_those_of_pasts_then_those_of_streams() -> None:
    streams = StreamTable(5)
    [a] = step(streams, cloned("a", "Ada"))
    [b] = step(streams, cloned("b", "Bob"))
    assert a.past is not None
    assert b.past is not None
    step(streams, cloned("c", "Ada", last=True))
    [free] = streams.free_slots
    assert step(streams, window("d", 0)) == [Place(free, None)]
    assert step(streams, window("e", 0)) == [Place(b.past.slot, None)]
    assert step(streams, window("f", 0)) == [Place(a.past.slot, None)]
    assert step(streams, window("g", 0)) == [Place(a.slot, None)]
    assert [streams.end_of(name) for name in "abdefg"] == [None, 11, 10, 10, 10, 10]


def test_a_new_stream_does_not_take_the_slot_of_the_past_that_it_begins_with() -> None:
    """It takes that of the least recently used stream instead, although pasts come first otherwise."""
    streams = StreamTable(3)
    [a] = step(streams, cloned("a", "Ada"))
    step(streams, window("b", 0))
    assert step(streams, cloned("c", "Ada")) == [
        Place(a.slot, None, PastState(a.past.slot if a.past else -1, is_computed=True))
    ]
    assert knows(streams, "Ada")


def test_live_streams_lose_no_state_to_pasts() -> None:
    streams = StreamTable(4)
    for number in range(10):
        step(streams, cloned(str(number), f"voice {number}", last=True))
        live = [window("a", 10 * number), window("b", 10 * number)]
        assert reads(step(streams, *live)) == [number > 0] * 2
    assert knows(streams, "voice 9")


def test_a_past_takes_the_slot_of_an_aborted_stream() -> None:
    """Else nothing could be kept any more after as many aborts as there are slots."""
    streams = StreamTable(4)
    for number in range(4):
        step(streams, window(str(number), 0))
    step(streams, cloned("a", "Ada"))
    assert [streams.end_of(str(number)) for number in range(4)] == [None, None, 10, 10]
    assert knows(streams, "Ada")


def test_the_windows_of_a_step_need_slots_before_pasts_do() -> None:
    streams = StreamTable(2)
    [a, b] = step(streams, cloned("a", "Ada"), cloned("b", "Ada"))
    assert a.past is b.past is None
    step(streams, cloned("c", "Ada", last=True))
    assert knows(streams, "Ada")
    [d, e] = step(streams, cloned("d", "Ada"), cloned("e", "Ada"))
    assert d.past is e.past is None


def test_a_failure_leaves_no_past_and_frees_each_slot_once() -> None:
    streams = StreamTable(4)
    step(streams, cloned("a", "Ada", last=True))
    streams.abandon(streams.enter([cloned(*pair) for pair in (("b", "Ada"), ("c", "Bob"))]))
    assert sorted(streams.free_slots) == [0, 1, 2, 3]
    assert not knows(streams, "Ada")
    assert not knows(streams, "Bob")
