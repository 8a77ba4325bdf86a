"""Requests whose talker gets text as ids: when it is opened, and what it is fed."""

import asyncio

import pytest

from omni_server.errors import CorruptDataError
from omni_server.family import MEDIA_ROW, TextRows
from omni_server.protocol.rows import RowsFeed, RowsPayload, Segment, SharedBlock, SourceSpan
from omni_server.types import AudioDelta, Finished
from tests.unit.orchestrator.fake_stages import STOP_CODE, Stages, asked, collected, kinds, only, settle

TEXT = TextRows((1, 2, 3), (SourceSpan(0, 0, 3, has_rows=False),), (8, 9))
MEDIA = TextRows(
    (1, MEDIA_ROW, MEDIA_ROW, 2, MEDIA_ROW, 3, 4),
    (
        SourceSpan(4, 0, 1, has_rows=False),
        SourceSpan(5, 1, 2, has_rows=True),
        SourceSpan(7, 3, 1, has_rows=False),
        SourceSpan(8, 4, 1, has_rows=True),
    ),
    (8, 9),
)


def media_rows(stages: Stages, *segments: tuple[int, int]) -> None:
    """Rows of the thinker: (first position in the talker's prompt, number)."""
    block = SharedBlock(len(stages.blocks), 1, 0)
    stages.blocks.append(block)
    sink = stages.thinker.stream.row_sink
    assert sink is not None
    sink(
        RowsPayload(12, 0, 4, "float32", block, tuple(Segment(first, count, 0) for first, count in segments))
    )


def rows_of(feeds: list[RowsFeed]) -> list[int | None]:
    """The id of each row that the talker has in the end, None for rows of the thinker. They must follow each
    other without gaps."""
    rows: list[int | None] = []
    for feed in feeds:
        for segment in feed.segments:
            assert segment.first_position == len(rows)
            if isinstance(segment, Segment):
                rows += [None] * segment.num_rows
            else:
                rows += segment.token_ids
        if feed.final_length is not None:
            assert feed.final_length <= len(rows)
            del rows[feed.final_length :]
    return rows


async def test_tokens_that_come_with_the_end_are_fed_without_the_end_token() -> None:
    stages, events = asked(text_rows=TEXT)
    await settle()
    stages.thinker.stream.send(100, 101, 199, text="ab", finish="stop")
    await settle()
    assert rows_of(stages.talker.stream.feeds) == [1, 2, 3, 100, 101]
    assert stages.talker.stream.feeds[-1].final_length == 5
    stages.talker.stream.send(STOP_CODE, finish="stop")
    await events
    assert stages.is_released()


async def test_the_last_token_before_a_limit_is_spoken() -> None:
    stages, events = asked(text_rows=TEXT)
    await settle()
    stages.thinker.stream.send(100, text="a")
    stages.thinker.stream.send(101, 102, text="bc", finish="length")
    await settle()
    assert rows_of(stages.talker.stream.feeds) == [1, 2, 3, 100, 101, 102]
    stages.talker.stream.send(1, 2, STOP_CODE, finish="stop")
    finished = (await events)[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "length"


async def test_one_token_at_the_limit_is_speech_already() -> None:
    stages, events = asked(text_rows=TEXT)
    await settle()
    stages.thinker.stream.send(100, text="a", finish="length")
    await settle()
    assert rows_of(stages.talker.stream.feeds) == [1, 2, 3, 100]
    stages.talker.stream.send(1, 2, STOP_CODE, finish="stop")
    assert isinstance(only(AudioDelta, await events), AudioDelta)


@pytest.mark.parametrize("text_rows", [TEXT, MEDIA])
async def test_a_reply_that_ends_at_once_has_no_sound(text_rows: TextRows) -> None:
    stages, events = asked(text_rows=text_rows)
    await settle()
    if text_rows is MEDIA:
        media_rows(stages, (1, 2), (4, 1))
        await settle()
    assert len(stages.talker.streams) == (text_rows is MEDIA)
    stages.thinker.stream.send(199, finish="stop")
    got = await asyncio.wait_for(events, 5)
    assert kinds(got) == ["TextDelta", "Finished"]
    assert stages.is_released()


@pytest.mark.parametrize(
    "steps", [[((1, 2), (4, 1))], [((1, 1),), ((2, 1),), ((4, 1),)], [((1, 2),), ((4, 1),)]]
)
async def test_text_lies_between_the_rows_of_media(steps: list[tuple[tuple[int, int], ...]]) -> None:
    stages, events = asked(text_rows=MEDIA)
    await settle()
    for segments in steps:
        media_rows(stages, *segments)
        await settle()
        assert stages.fed_blocks() == stages.blocks, "the queue may have no slot for the next rows"
    assert len(rows_of(stages.talker.stream.feeds)) == len(MEDIA.row_ids), "there is nothing to speak yet"
    stages.thinker.stream.send(100, text="a")
    await settle()
    stages.thinker.stream.send(101, text="b")
    stages.thinker.stream.send(199, finish="stop")
    await settle()
    feeds = stages.talker.stream.feeds
    assert rows_of(feeds) == [1, None, None, 2, None, 3, 4, 100, 101]
    assert [feed.tail_ids for feed in feeds] == [(8, 9), *[()] * (len(feeds) - 1)]
    stages.talker.stream.send(STOP_CODE, finish="stop")
    await events
    assert stages.is_released()


async def test_rows_of_media_that_never_came_are_an_error_and_not_a_wait_without_end() -> None:
    stages, events = asked(text_rows=MEDIA)
    await settle()
    media_rows(stages, (1, 2))
    stages.thinker.stream.send(100, 101, text="ab")
    stages.thinker.stream.send(199, finish="stop")
    with pytest.raises(CorruptDataError, match="0 rows for 2 tokens"):
        await asyncio.wait_for(events, 5)
    assert stages.is_released()


async def test_a_stop_string_at_the_very_beginning_leaves_nothing_to_speak() -> None:
    stages = Stages()
    run = stages.run(detokenize=lambda ids: "STOP!"[: 2 * len(ids)], text_rows=TEXT)
    events = asyncio.create_task(collected(run))
    await settle()
    stages.thinker.stream.send(100)
    stages.thinker.stream.send(101, finish="stop", is_cut=True)
    got = await asyncio.wait_for(events, 5)
    assert stages.talker.streams == []
    assert not {"CodecDelta", "AudioDelta"} & set(kinds(got))
    assert stages.is_released()
